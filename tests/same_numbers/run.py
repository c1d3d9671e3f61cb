"""Compares every number of two checkouts, digit for digit: the proof that a redesign changed none.

python tests/same_numbers/run.py OTHER             this checkout beside another one, by its folder
python tests/same_numbers/run.py OTHER resumed     the configurations with this in their name

Each configuration (configurations.py) is trained by `scripts/train.py` of either checkout, with one
thread, in a process forked from one that has imported torch. Compared are all scalars of the event
file, the summary, and the tensors of the newest checkpoint: weights as their masters, buffers, the
optimizer's state and the average. What measures time or memory is left out. Exit code 1 where a
number differs, or a run of either fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "helpers"), str(ROOT)]
import torch  # noqa: E402
from configurations import Configuration, configurations  # noqa: E402
from in_process import differing, scalars  # noqa: E402

# Parts of tags, of keys of the summary and of places in a checkpoint that hold times or memory.
_MEASURED = ["seconds", "per_second", "memory", "step_times", "throughput", "curves", "folder"]
_MEASURED += ["usage/command"]  # It names the folder.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("wanted", nargs="?", default="", help="part of the names to compare")
    asked = parser.parse_args()
    chosen = [c for c in configurations() if asked.wanted in c.name]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folders = {"the other": Path(name) / "0", "this": Path(name) / "1"}
        checkouts = zip(folders.values(), (asked.other.resolve(), ROOT), strict=True)
        servers = [_serve(checkout, chosen, folder) for folder, checkout in checkouts]
        for number, configuration in enumerate(chosen):
            said = ""
            for whose, server in zip(folders, servers, strict=True):
                line = server.stdout.readline() if server.stdout else ""
                if line != "\n":
                    said = said or f"{whose} checkout: {line.strip() or 'its process died'}"
            said = said or compared(*(folder / f"{number}" for folder in folders.values()))
            failed += said != "same"
            print(f"[{number + 1}/{len(chosen)}] {configuration.name}: {said}", flush=True)
    print(f"{len(chosen)} configurations, {failed} differ")
    return 1 if failed else 0


def _serve(checkout: Path, chosen: list[Configuration], work: Path) -> "subprocess.Popen[str]":
    """Start the process that trains the configurations with the code of a checkout."""
    work.mkdir()
    places = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs = json.dumps([(own.options, own.ranks, own.resumed) for own in chosen])
    command = [sys.executable, str(HERE.parent / "train.py"), str(checkout), runs]
    return subprocess.Popen(
        command, cwd=work, env=os.environ | places, stdout=subprocess.PIPE, text=True
    )


def compared(theirs: Path, ours: Path) -> str:
    """Return `same`, or where the folders of two runs differ."""
    found = differing(*(_left_in(folder) for folder in (theirs, ours)))
    found = [path for path in found if not any(part in path for part in _MEASURED)]
    return f"{len(found)} numbers differ; {'; '.join(found[:3])}" if found else "same"


def _left_in(folder: Path) -> dict[str, Any]:
    files = max((folder / "checkpoints").glob("step_*")).glob("*.pt")
    state = {file.stem: torch.load(file, weights_only=True) for file in files}
    summary = json.loads((folder / "summary.json").read_text())
    return {**state, "scalars": scalars(folder), "summary": summary}


if __name__ == "__main__":
    raise SystemExit(main())
