"""The input's share of a step: shipped workloads, fed by their own loader.

One trainer takes the same step on batches that are there already and on batches that its loader
fetches, in the main process (workers=0) and in a process beside it (workers=1). The loader
counts the seconds in which the trainer waits for it, and

    share = wait / time of the turn

is taken within the turn, so that a busy machine hardly moves it. The ratio of the whole steps has
more noise, and has in it what a worker takes from the trainer: a core, the cache.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import Clock, Competitor, Spread, race, threads
from bench.photographs import make_photographs
from bench.table import Claim, Table
from mpframe.assembly import build_loaders, build_task, build_trainer
from mpframe.config.command_line import checked, compose_named
from mpframe.config.schema import Config
from mpframe.data.loading import Loader
from mpframe.training.trainer import Trainer

THERE = "batches that are there"
MOST = 0.05  # of a step: the rest is the model's own speed
DECODED = "image folder, decoded each time"
SKIPPED = 3  # steps at the start of a turn: a worker has fetched two batches since its last one
_PHOTOGRAPHS = 256

_FOLDER = (
    "experiment=image_folder_resnet18",
    *("dataset.root=FOLDER", "dataset.classes=2", "dataset.batch_size=32", "model.width=16"),
)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "digits_mlp": ("experiment=digits_mlp",),
    "shapes_unet_small": ("experiment=shapes_unet", "+size=small"),
    "speech_lstm_small": ("experiment=speech_lstm", "+size=small"),
    "gpt_small": ("experiment=gpt", "+size=small"),
    "detection_ssd_small": ("experiment=detection_ssd", "+size=small"),
    "image folder, kept in memory": _FOLDER,
    DECODED: (*_FOLDER, "dataset.cache_bytes=0"),
}
"""The options of each; FOLDER becomes a folder of photographs."""


def tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Sequence[str]] = WORKLOADS,
    workers: Sequence[int] = (0, 1),
    steps: int = 20,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: generated photographs go there.
        workloads: the options of each by its name.
        workers: how many processes load, one row each.
        steps: per turn, and SKIPPED before them.
    """
    make_photographs(folder / "photographs", _PHOTOGRAPHS)
    with threads(1):
        return [
            _table(name, _config(options, folder / "photographs"), rounds, workers, steps)
            for name, options in workloads.items()
        ]


class Turn:
    """A turn of some steps of a trainer.

    Args:
        trainer: takes the steps.
        batches: without end.
        loader: what they come from; None: they are there.
        steps: those that count.
        clock: seconds.

    Attributes:
        shares: the input's share of each turn so far, 0 to 1.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterator[Any],
        loader: Loader | None,
        steps: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._trainer, self._batches, self._loader = trainer, batches, loader
        self._steps, self._clock = steps, clock
        self.shares: list[float] = []

    def __call__(self) -> float:
        """Seconds per step."""
        self._train(SKIPPED)
        began, waited = self._clock(), self._waited()
        self._train(self._steps)
        seconds = self._clock() - began
        self.shares.append((self._waited() - waited) / seconds)
        return seconds / self._steps

    def _waited(self) -> float:
        return 0.0 if self._loader is None else self._loader.waited

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._trainer.train_step(next(self._batches))
        self._trainer.read_verdicts()  # Waits for a device that is still computing.


def _table(name: str, config: Config, rounds: int, workers: Sequence[int], steps: int) -> Table:
    task = build_task(config)
    loaders = {f"workers={n}": _loader(config, task, n) for n in workers}
    first = next(iter(loaders.values()))
    trainer = build_trainer(config, task, len(first))
    try:
        there = itertools.cycle(list(itertools.islice(_endless(first), steps + SKIPPED)))
        turns = {THERE: Turn(trainer, there, None, steps)}
        for row, loader in loaders.items():
            turns[row] = Turn(trainer, _endless(loader), loader, steps)
        times = race([Competitor(row, turn) for row, turn in turns.items()], rounds)
    finally:
        for loader in loaders.values():
            loader.close()
    claims = [
        Claim(f"the input's share of a step, {row}", Spread.of(turns[row].shares[-rounds:]), MOST)
        for row in loaders
    ]
    return Table(f"Input, {name}", _setting(config), THERE, times, claims)


def _setting(config: Config) -> str:
    return f"Batch {config.data.batch_size}, {config.dtype.mode}, one thread for the model."


def _loader(config: Config, task: Any, workers: int) -> Loader:
    return build_loaders(replace(config, data=replace(config.data, workers=workers)), task).train


def _endless(loader: Loader) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def _config(options: Sequence[str], photographs: Path) -> Config:
    given = [option.replace("FOLDER", str(photographs)) for option in options]
    # A CPU is slow at float16, which would hide the input; and a schedule ends some time.
    return checked(compose_named([*given, "dtype=fp32", "scheduler=none"])[1])
