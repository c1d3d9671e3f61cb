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
sys.path.insert(0, str(HERE.parent))
from configurations import Configuration, configurations  # noqa: E402


def main() -> int:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("wanted", nargs="?", default="", help="part of the names to compare")
    asked = parser.parse_args()
    chosen = [c for c in configurations() if asked.wanted in c.name]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        servers = [_serve(asked.other.resolve(), chosen, folder), _serve(ROOT, chosen, folder)]
        for number, configuration in enumerate(chosen, 1):
            theirs, ours = (_next(server) for server in servers)
            said = _compared(theirs, ours)
            failed += said != "same"
            print(f"[{number}/{len(chosen)}] {configuration.name}: {said}", flush=True)
    print(f"{len(chosen)} configurations, {failed} differ")
    return 1 if failed else 0


def _serve(checkout: Path, chosen: list[Configuration], folder: str) -> "subprocess.Popen[str]":
    """Start the process that trains the configurations with the code of a checkout."""
    work = Path(folder) / f"{len(os.listdir(folder))}"
    work.mkdir()
    places = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = json.dumps([configuration.name for configuration in chosen])
    command = [sys.executable, str(HERE.parent / "train.py"), str(checkout), names]
    return subprocess.Popen(
        command, cwd=work, env=os.environ | places, stdout=subprocess.PIPE, text=True
    )


def _next(server: "subprocess.Popen[str]") -> dict[str, Any]:
    assert server.stdout is not None
    line = server.stdout.readline()
    return json.loads(line) if line else {"error": "its process died"}


def _compared(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return `same`, or where the two differ."""
    for whose, numbers in (("the other", theirs), ("this", ours)):
        if "error" in numbers:
            return f"{whose} checkout: {numbers['error']}"
    found = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
    if not found:
        return "same"
    shown = [f"{key}: {theirs.get(key)} became {ours.get(key)}" for key in found[:3]]
    return f"{len(found)} of {len(theirs)} differ; " + "; ".join(shown)


if __name__ == "__main__":
    raise SystemExit(main())
