"""What a rank does in the tests of several: runs, and callbacks that put one rank into trouble."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from checkout import HELPERS, ROOT
from in_process import train
from sameness import differing, results

from mpframe import Trainer
from mpframe.checkpoint import saving
from mpframe.core.callback import Callback
from mpframe.core.errors import MpframeError
from mpframe.data import classification
from mpframe.data.task import Task

OWN = ["dataset=own", "dataset._target_=ranked.points", "dataset.batch_size=8", "model=own",
       "model._target_=torch.nn.Linear", "+model.in_features=4", "+model.out_features=2",
       "trainer.max_steps=4"]  # fmt: skip
NET = ["model=mlp", "model.hidden=16", "trainer.max_steps=8", "trainer.checkpoint_every=4"]
NOISY = [*NET, "model.hidden=32", "model.dropout=0.2", "dataset.augment=crop",
         "trainer.ema_decay=0.9", "dtype/products=nvfp4"]  # fmt: skip


def trouble(rank: int, step: int, name: str) -> list[str]:
    """The options by which a rank gets a signal."""
    values = f"_target_=ranked.Trouble rank={rank} step={step} name={name}"
    return [f"+callbacks.trouble.{word}" for word in values.split()]


def summary_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def assert_same_results(undisturbed: Path, other: Path) -> None:
    """But for what is measured."""
    found = differing(results(undisturbed), results(other))
    assert [path for path in found if not path.startswith("/state/usage")] == []


def torchrun(*words: str, within: float = 240) -> subprocess.CompletedProcess[str]:
    """What the page tells to type: two ranks of scripts/train.py, and what they say."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    start += [word for word in words if word.startswith("--")]
    start += [f"{ROOT}/scripts/train.py", *(word for word in words if not word.startswith("--"))]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    own: Any = {"capture_output": True, "text": True, "timeout": within, "cwd": HELPERS}
    return subprocess.run(start, env=env, check=False, **own)


def run(folder: Path, *options: str) -> Any:
    """Train on this rank; its summary, or the kind and text of the error that ended it."""
    try:
        return train(folder, *options)
    except MpframeError as error:
        return type(error).__name__, str(error)


def runs(folder: Path, options: list[list[str]]) -> list[Any]:
    return [run(folder / str(number), *own) for number, own in enumerate(options)]


class Trouble(Callback):
    """At a step a rank gets a signal; not again where torchrun has started it once more."""

    def __init__(self, rank: int, step: int, name: str) -> None:
        self._at, self._signal = (rank, step), signal.Signals[name]

    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and (trainer.comm.rank, trainer.progress.global_step) == self._at:
            os.kill(os.getpid(), self._signal)


class Drift(Callback):
    """Writes the weights of rank 1 behind the trainer's back."""

    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        if trainer.comm.rank == 1:
            next(trainer.model.parameters()).detach().add_(0.01)


class Overflow(Callback):
    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        if trainer.comm.rank == 1:
            batches[0][0].fill_(6e4)


class FullDisk(Callback):
    """Rank 1 cannot write its part of a checkpoint."""

    def on_save(self, trainer: Trainer) -> None:
        def write(path: Path, content: object) -> None:
            saving._write_file = written  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if trainer.comm.rank == 1:
            written, saving._write_file = saving._write_file, write  # type: ignore[assignment]


def rows(count: int, bad: int | None = None) -> Any:
    """Of four numbers; one may hold nan."""
    values = [torch.nan if row == bad else row / count for row in range(count)]
    return [(torch.full((4,), value), row % 2) for row, value in enumerate(values)]


def points(bad: int | None = None) -> Task:
    return classification(rows(32, bad), rows(7))


def seeded_otherwise() -> torch.nn.Module:
    """A model that is another one in each process."""
    torch.manual_seed(os.getpid())
    return torch.nn.Linear(4, 2)


def runs_otherwise(folder: Path, options: list[str], others: list[list[str]]) -> list[Any]:
    """The same where all ranks but rank 0 have other options besides."""
    other = os.environ["RANK"] != "0"
    return runs(folder, [[*options, *(own if other else [])] for own in others])
