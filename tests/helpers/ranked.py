"""What a rank does in the tests of several: runs, and callbacks that put one rank into trouble."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
from in_process import train
from torch import Tensor
from torch.utils.data import Dataset

from mpframe import Trainer
from mpframe.checkpoint import saving
from mpframe.core.callback import Callback
from mpframe.core.errors import MpframeError
from mpframe.data import classification
from mpframe.data.task import Task


def run(folder: Path, *options: str) -> Any:
    """Train on this rank; its summary, or the kind and text of the error that ended it."""
    try:
        return train(folder, *options)
    except MpframeError as error:
        return type(error).__name__, str(error)


def runs(folder: Path, options: list[list[str]]) -> list[Any]:
    """The same for several runs, one after another, each in a folder of its own."""
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
            with torch.no_grad():
                next(trainer.model.parameters()).add_(0.01)


class Overflow(Callback):
    """The samples of rank 1 grow beyond float16."""

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


class Points(Dataset[Any]):
    def __init__(self, count: int, bad: int | None) -> None:
        self._count, self._bad = count, bad

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        value = float("nan") if index == self._bad else index / self._count
        return torch.full((4,), value), index % 2


def points(bad: int | None = None) -> Task:
    """Rows of four numbers; one may hold nan."""
    return classification(Points(32, bad), Points(7, None))


def seeded_otherwise() -> torch.nn.Module:
    """A model that is another one in each process."""
    torch.manual_seed(os.getpid())
    return torch.nn.Linear(4, 2)


def runs_otherwise(folder: Path, options: list[str], others: list[list[str]]) -> list[Any]:
    """The same where all ranks but rank 0 have other options besides."""
    other = os.environ["RANK"] != "0"
    return runs(folder, [[*options, *(own if other else [])] for own in others])
