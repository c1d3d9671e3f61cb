"""Compares every number of two checkouts, digit for digit: the proof that a redesign changed none.

python tests/same_numbers/run.py OTHER             this checkout beside another one, by its folder
python tests/same_numbers/run.py OTHER resumed     the configurations with this in their name

Each configuration is trained by `scripts/train.py` of either checkout, with one thread: a dozen
steps on the handwritten digits, or on data that it generates. Backoff begins high, so that its runs
skip steps and drop micro-batches before they find their scale. Compared are all scalars of the
event file, the summary, and the tensors of the newest checkpoint: weights as their masters,
buffers, the optimizer's state and the average. What measures time or memory is left out. Exit code
1 where a number differs, or a run of either fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]
import torch  # noqa: E402
from in_process import differing, scalars  # noqa: E402

# Parts of tags, of keys of the summary and of places in a checkpoint that hold times or memory.
_MEASURED = ["seconds", "per_second", "memory", "step_times", "throughput", "curves", "folder"]
_MEASURED += ["usage/command"]  # It names the folder.
_SHORT = (
    *("trainer.max_steps=12", "trainer.eval_every=6", "trainer.checkpoint_every=6"),
    *("trainer.log_every=1", "callbacks.progress_bar=null", "callbacks.autopsy=null"),
)
_DIGITS = ("model=mlp", "model.hidden=32", "dataset.batch_size=32")
_MODES = {
    "fp32": "dtype=fp32",
    "mixed float16": "dtype=mixed",
    "mixed bfloat16": "dtype=mixed_bf16",
    "amp float16": "dtype=amp",
    "amp bfloat16": "dtype=amp_bf16",
}
_SCALERS = {
    "no scaling": ("loss_scaling=none",),
    "Backoff": ("loss_scaling=Backoff", "loss_scaling.init_scale=16777216"),
    "LogMax": ("loss_scaling=LogMax", "loss_scaling.init_scale=16777216"),
    "static": ("loss_scaling=static", "loss_scaling.scale=4096"),
}
_WINDOWS = {"one batch": (), "windows of 3": ("trainer.accumulate=3",)}
_CLIPPING = {"unclipped": (), "clipped": ("trainer.clip_norm=0.5",)}
_BATCH_NORM = ("model=cnn", "model.width=4")
_PARTS = {
    "SGD": (*_DIGITS, "optimizer=sgd", "optimizer.momentum=0.9", "scheduler=poly"),
    "fused AdamW": (*_DIGITS, "+optimizer.fused=true"),
    "Muon": (*_DIGITS, "optimizer=muon_adamw"),
    "groups": (*_DIGITS, "optimizer.groups={biases: {ndim: 1, weight_decay: 0, lr: 0.006}}"),
    "LARC": (*_DIGITS, "optimizer=sgd", "callbacks=larc"),
    "cnn": _BATCH_NORM,
    "cnn recomputed": (*_BATCH_NORM, "trainer.recompute=['*']"),
    "cnn averaged": (*_BATCH_NORM, "trainer.ema_decay=0.9"),
    "gpt": ("experiment=gpt", "+size=small", "model.depth=1", "model.heads=2", "model.width=16",
            "dataset.batch_size=4", "dataset.context=16", "dataset.eval_windows=8"),
    "lstm": ("experiment=speech_lstm", "+size=small", "dataset.train=128", "model.hidden=8"),
    "unet": ("experiment=shapes_unet", "+size=small", "dataset.batch_size=4", "dataset.images=80",
             "dataset.image_size=16", "model.width=4"),
    "gan": ("experiment=digits_gan", "dataset.batch_size=32"),
    "gan together": ("experiment=digits_gan", "dataset.batch_size=32", "optimizer.skip=all"),
}  # fmt: skip
_RANKS = {
    "ddp": (),
    "ddp after the backward pass": ("trainer.reduce=after_backward",),
    "fsdp": ("trainer.parallel=fsdp",),
}


class Configuration(NamedTuple):
    name: str  # what tells it from the others
    options: tuple[str, ...]  # of the command line
    ranks: int = 1  # processes that train together
    resumed: bool = False  # stopped after half of its steps, and resumed


def configurations() -> Iterator[Configuration]:
    """Modes x scalers x windows x the rest."""
    for mode, scaler, window, clipping in product(_MODES, _SCALERS, _WINDOWS, _CLIPPING):
        if scaler == "no scaling" or mode.endswith(" float16"):
            options = (*_SCALERS[scaler], *_WINDOWS[window], *_CLIPPING[clipping])
            yield _of(f"{mode}, {scaler}, {window}, {clipping}", mode, *_DIGITS, *options)
    for mode, (name, options) in product(("mixed float16", "amp bfloat16"), _PARTS.items()):
        yield _of(f"{mode}, {name}", mode, *options)
    for recipe in ("fp8_tensorwise", "fp8_rows", "mxfp8", "mxfp4", "nvfp4"):
        options = (*_DIGITS, f"dtype/products={recipe}")
        yield _of(f"mixed bfloat16, {recipe}", "mixed bfloat16", *options)
    for mode in _MODES:
        searching = _SCALERS["Backoff"] if mode.endswith(" float16") else ()
        run = (*_DIGITS, *searching)
        for kind, options in _RANKS.items():
            yield _of(f"{mode}, {kind}", mode, *run, *options, ranks=2)
        yield _of(f"{mode}, resumed", mode, *run, resumed=True)
        options = (*_BATCH_NORM, *searching, "trainer.ema_decay=0.9", "trainer.accumulate=2")
        yield _of(f"{mode}, averaged, resumed", mode, *options, resumed=True)
    run = (*_DIGITS, *_SCALERS["Backoff"])
    yield _of("mixed float16, ddp, resumed", "mixed float16", *run, ranks=2, resumed=True)


def _of(name: str, mode: str, *options: str, **rest: Any) -> Configuration:
    return Configuration(name, (*options, _MODES[mode], *_SHORT), **rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("wanted", nargs="?", default="", help="part of the names to compare")
    asked = parser.parse_args()
    chosen = [own for own in configurations() if asked.wanted in own.name]
    failed, checkouts = 0, {"the other": asked.other.resolve(), "this": ROOT}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(checkouts)) as pool:
        for number, own in enumerate(chosen):
            folders = [Path(name, whose, str(number)) for whose in checkouts]
            errors = pool.map(train, checkouts.values(), [own] * len(folders), folders)
            ended = zip(checkouts, errors, strict=True)
            told = [f"{whose} checkout: {error}" for whose, error in ended if error]
            said = told[0] if told else compared(*folders)
            failed += said != "same"
            print(f"[{number + 1}/{len(chosen)}] {own.name}: {said}", flush=True)
    print(f"{len(chosen)} configurations, {failed} differ")
    return 1 if failed else 0


def train(checkout: Path, own: Configuration, folder: Path) -> str:
    """Train with the code of a checkout; what went wrong."""
    folder.mkdir(parents=True)
    places = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    together = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={own.ranks}"]
    command = [sys.executable, *(together if own.ranks > 1 else [])]
    command += [str(checkout / "scripts" / "train.py"), *own.options, "hydra.run.dir=."]
    # Resumed without a schedule: a longer plan would change the learning rate.
    halves = [["scheduler=none", "trainer.max_steps=6"], ["scheduler=none", "resume=auto"]]
    for words in halves if own.resumed else [[]]:
        done = subprocess.run(
            [*command, *words], cwd=folder, env=os.environ | places, capture_output=True, text=True
        )
        if done.returncode:
            return f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return ""


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
