"""Whole programs: runs beside other trainers, the input's share of a step, the start.

runs: the time from before the first step to the end of the last validation, the same by hand and by
other trainers, a process for each: loading, steps, logging, validating. Beside it stand the time
that the processor computed for it, which other load disturbs less, and the whole process, imports
and start-up included.

input: shipped workloads, fed by their loader. One trainer takes the same step on batches that
are there already and on batches that its loader fetches, in the main process (workers=0) and in a
process beside it (workers=1). The loader counts the seconds in which the trainer waits for it, and

    share = wait / time of the turn

is taken within the turn, so that a busy machine hardly moves it. The ratio of the whole steps has
more noise, and has in it what a worker takes from the trainer: a core, the cache.

startup: the help, a refused mistake, the first step, each as a new process. Importing only torch is
the baseline: help and a mistake are answered without it.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.child import run_python
from bench.measure import Clock, Competitor, Spread, Times, race, threads, timed
from bench.photographs import make_photographs
from bench.table import Claim, Table
from bench.whole import trainers
from bench.whole.loop_time import LoopTime
from bench.whole.one_run import OURS
from bench.whole.workloads import WORKLOADS, Workload
from mpframe.config.command_line import compose_named
from mpframe.config.composing import check_config
from mpframe.config.schema import Config
from mpframe.core.errors import MpframeError, first_line
from mpframe.data.loading import Loader
from mpframe.run.parts import build_loaders, build_task
from mpframe.run.trainer import build_trainer
from mpframe.training.trainer import Trainer

MOST_OF_RUN = 1.03  # times a loop by hand
SIZES: dict[str, dict[str, int]] = {name: {} for name in WORKLOADS}
"""The workloads, each with its sizes."""


def run_tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Mapping[str, int]] = SIZES,
    names: Sequence[str] | None = None,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: runs go into a temporary folder.
        workloads: the sizes of each, by its name.
        names: the trainers that take part. None: all that are installed.
    """
    chosen = [OURS, *(trainers.installed() if names is None else names)]
    return [_of_runs(name, sizes, rounds, chosen) for name, sizes in workloads.items()]


def _of_runs(name: str, sizes: Mapping[str, int], rounds: int, names: Sequence[str]) -> Table:
    work = WORKLOADS[name](**sizes)
    why = _missing(work)
    if why is not None:
        return Table(work.title, "", trainers.BY_HAND, {}, notes=[f"skipped: {why}"])
    with tempfile.TemporaryDirectory() as scratch:
        runs = {row: Runs(name, sizes, row, Path(scratch)) for row in names}
        # No warm-up: nothing of a process is left for the next.
        times = race([Competitor(row, run) for row, run in runs.items()], rounds, warmup=0)
    cpu = {row: [time.cpu_seconds for time in run.times] for row, run in runs.items()}
    whole = {row: run.whole for row, run in runs.items()}
    return Table(
        work.title,
        _run_setting(work),
        trainers.BY_HAND,
        times,
        [*_run_claims(times, ""), *_run_claims(cpu, ", CPU time")],
        trainers.skipped(),
        {"CPU time, ms": _in_ms(cpu), "whole process, ms": _in_ms(whole)},
    )


class Runs:
    """The runs of one trainer.

    Args:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        trainer: who trains.
        folder: an existing one for all that is logged.

    Attributes:
        times: of the loop of each run so far.
        whole: seconds of its process.
    """

    def __init__(self, workload: str, sizes: Mapping[str, int], trainer: str, folder: Path) -> None:
        self._given = {"workload": workload, "sizes": dict(sizes), "trainer": trainer}
        self._folder = folder
        self.times, self.whole = list[LoopTime](), list[float]()

    def __call__(self) -> float:
        """Seconds of the loop of one more run.

        Raises:
            MpframeError: the process failed.
        """
        folder = tempfile.mkdtemp(dir=self._folder)
        words = ["-m", "bench.whole.one_run", json.dumps({**self._given, "folder": folder})]
        began = perf_counter()
        printed = run_python(words, self._folder, f"runs: {self._given['trainer']!r}")
        self.whole.append(perf_counter() - began)
        self.times.append(LoopTime(**json.loads(printed.strip().rpartition("\n")[2])))
        return self.times[-1].seconds


def _run_claims(times: Times, kind: str) -> list[Claim]:
    others = [name for name in times if name != OURS]
    by_hand = (trainers.BY_HAND, trainers.CUT)
    return [
        Claim.between(times, OURS, name, MOST_OF_RUN if name in by_hand else 1.0, kind)
        for name in others
    ]


def _in_ms(times: Times) -> dict[str, list[float]]:
    return {name: [value * 1e3 for value in values] for name, values in times.items()}


def _missing(work: Workload) -> str | None:
    """Return the reason why this machine cannot run a workload, or None."""
    try:
        work.data(), work.model()
    except (ImportError, MpframeError) as error:
        return first_line(error)
    return None


def _run_setting(work: Workload) -> str:
    length = f"{work.epochs} epochs" if work.max_steps is None else f"{work.max_steps} steps"
    return (
        f"Batch {work.batch_size}, {length}, AdamW, fp32, one thread, TensorBoard every 10 steps, "
        "a validation after each epoch and at the end."
    )


THERE = "batches that are there"
MOST_OF_STEP = 0.05  # of a step: the rest is the model's own speed
DECODED = "image folder, decoded each time"
SKIPPED = 3  # steps at the start of a turn: a worker has fetched two batches since its last one
_PHOTOGRAPHS = 256

_FOLDER = (
    "experiment=image_folder_resnet18",
    *("dataset.root=FOLDER", "dataset.classes=2", "dataset.batch_size=32", "model.width=16"),
)
INPUTS: dict[str, tuple[str, ...]] = {
    "digits_mlp": ("experiment=digits_mlp",),
    "shapes_unet +size=small": ("experiment=shapes_unet", "+size=small"),
    "speech_lstm +size=small": ("experiment=speech_lstm", "+size=small"),
    # A constant learning rate has no warm-up.
    "gpt +size=small": (
        *("experiment=gpt", "+size=small"),
        *("~scheduler.warmup", "~scheduler.min_factor"),
    ),
    "detection_ssd +size=small": ("experiment=detection_ssd", "+size=small"),
    "image folder, kept in memory": _FOLDER,
    DECODED: (*_FOLDER, "dataset.cache_bytes=0"),
}
"""The options of each. FOLDER becomes a folder of photographs."""


def input_tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Sequence[str]] = INPUTS,
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
            _of_input(name, _config(options, folder / "photographs"), rounds, workers, steps)
            for name, options in workloads.items()
        ]


class Turn:
    """A turn of some steps of a trainer.

    Args:
        trainer: takes the steps.
        batches: without end.
        loader: what they come from. None: they are there.
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


def _of_input(name: str, config: Config, rounds: int, workers: Sequence[int], steps: int) -> Table:
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
        Claim(
            f"the input's share of a step, {row}",
            Spread.of(turns[row].shares[-rounds:]),
            MOST_OF_STEP,
        )
        for row in loaders
    ]
    return Table(f"Input, {name}", _input_setting(config), THERE, times, claims)


def _input_setting(config: Config) -> str:
    return f"Batch {config.data.batch_size}, {config.dtype.mode}, one thread for the model."


def _loader(config: Config, task: Any, workers: int) -> Loader:
    return build_loaders(replace(config, data=replace(config.data, workers=workers)), task).train


def _endless(loader: Loader) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def _config(options: Sequence[str], photographs: Path) -> Config:
    given = [option.replace("FOLDER", str(photographs)) for option in options]
    # A CPU is slow at float16, which would hide the input, and a schedule ends some time.
    return check_config(compose_named([*given, "dtype=fp32", "scheduler=none"])[1])


IMPORT_TORCH = "import torch"
MOST_OF_START = 1.5  # times a step by hand
MOST_OF_TYPO = 0.3  # seconds

_PROGRAM = ["-c", "from mpframe.cli.commands.train import main; main()"]  # as scripts/train.py
# torch imports its compiler when the first optimizer is made: part of anybody's first step.
_ADAMW_STEP = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight])
weight.sum().backward()
optimizer.step()
"""
_STEP, _TYPO = "import torch, one step of AdamW", "a refused typo"
_RUN = "default run, to the end of its first step"
_FIRST_STEP = ["-m", "bench.first_step", "callbacks.progress_bar=null", "hydra.run.dir=run"]
# For each row the command, and the exit code it must have.
_COMMANDS: dict[str, tuple[list[str], int]] = {
    IMPORT_TORCH: (["-c", "import torch"], 0),
    _STEP: (["-c", _ADAMW_STEP], 0),
    "--help": ([*_PROGRAM, "--help"], 0),
    _TYPO: ([*_PROGRAM, "trainer.max_stepz=1"], 1),
    _RUN: (_FIRST_STEP, 0),
}


def startup_tables(
    rounds: int, folder: Path, names: Sequence[str] = tuple(_COMMANDS)
) -> list[Table]:
    """The waits at start-up.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: runs go into a temporary folder.
        names: what is measured, `IMPORT_TORCH` among it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        times = race([_competitor(name, Path(scratch)) for name in names], rounds)
    setting = "A new Python process each, from its start to its end."
    return [Table("Start-up", setting, IMPORT_TORCH, times, _startup_claims(times))]


def _startup_claims(times: Times) -> list[Claim]:
    claims = []
    if _TYPO in times:
        claims.append(Claim(f"{_TYPO}, seconds", Spread.of(times[_TYPO]), MOST_OF_TYPO))
    if _RUN in times and _STEP in times:
        claims.append(Claim.between(times, _RUN, _STEP, MOST_OF_START))
    return claims


def _competitor(name: str, scratch: Path) -> Competitor:
    arguments, expected = _COMMANDS[name]

    def run() -> None:
        run_python(arguments, scratch, f"startup: {name!r}", expected)

    return Competitor(name, timed(run))
