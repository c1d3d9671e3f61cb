"""The overhead of a step, and of a report of the ranges.

tiny: a step so short that only the trainer's own overhead shows. An MLP 64-128-128-10 with batches
of 64 on one thread: forward, backward and AdamW take about half a millisecond. Every competitor
trains the same model on the same batches and logs the same four curves (loss, learning rate,
gradient norm, speed) every ten steps to TensorBoard: mpframe through its callbacks, the loop by
hand through `SummaryWriter.add_scalar`, Lightning through `log`. mpframe logs four more, and checks
and records the gradients of every step.

ranges: a step with a report (numerics=on) beside one without. One step in a hundred has a report,
so the time of training grows by

    (99 + t(step with report) / t(step)) / 100

Hooks, counts, the transfer, the record and the scalars are in it. Pictures, which are drawn at the
end of a run and at most once a minute, are not.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import rivals
from bench.calls import calls_of_a_step
from bench.hand_loop import LOG_EVERY, HandLog, Loop, hand_loop
from bench.measure import Competitor, Spread, Stopwatch, Times, race, ratio, threads, timed
from bench.step.parts import watched
from bench.table import Claim, Table
from mpframe.core.callback import Callback
from mpframe.core.loss_scaling import Backoff, LogMax, Static
from mpframe.core.loss_scaling.scaler import Scaling
from mpframe.core.objective import supervised
from mpframe.lab.range_watch import RangeWatch
from mpframe.precision.precision import Precision
from mpframe.tracking.logger import Loggers
from mpframe.tracking.tracker import Tracker
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.callbacks.records import Curves, RecordAmax
from mpframe.training.plan import Plan
from mpframe.training.results import Results, Throughput
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer, run_callbacks
from mpframe.training.trainers.compiled_step import CompiledTrainer
from mpframe.workloads.images import mlp, resnet18

HAND = "by hand"
CHECKED = "by hand, gradients checked"  # every step: their norm, and the step only if it is finite
COMPILED = "mpframe, compiled"
STEP = "mpframe, the step compiled"
BATCH = 64
MOST = 1.05  # times the loop by hand
MOST_COMPILED = 1.0
MOST_LOGMAX = 1.02  # times Backoff: as close as a ratio can be told here
# So small that the random labels are not learnt by heart: gradients would become subnormal numbers,
# which are slow to compute with.
LR = 1e-6


def tiny_tables(rounds: int, folder: Path, steps: int = 100) -> list[Table]:
    """The step with logging, beside other trainers, and without.

    Args:
        rounds: measured rounds, >= 1.
        folder: event files go there.
        steps: measured steps per turn, a multiple of the steps between two logs.
    """
    data = _data(steps)
    with threads(1):
        return [
            _with_logging(rounds, folder, data),
            _without_logging(rounds, data),
            _scalers(rounds, data),
            _parts_of_a_step(rounds, folder, data),
            _calls(data),
        ]


def _with_logging(rounds: int, folder: Path, data: Stopwatch) -> Table:
    loops = {
        HAND: hand_loop(*_parts(), data, HandLog(folder / "by_hand")),
        CHECKED: hand_loop(*_parts(), data, HandLog(folder / "checked"), checked=True),
        "mpframe": watched_loop(data, folder / "mpframe"),
    }
    marks = [("mpframe", HAND, MOST), ("mpframe", CHECKED, MOST)]
    skipped = rivals.skipped()
    if _has_compiler():
        model, optimizer = _parts()
        model.compile()
        log = HandLog(folder / "by_hand_compiled")
        loops[f"{HAND}, compiled"] = hand_loop(model, optimizer, data, log)
        loops[COMPILED] = watched_loop(data, folder / "compiled", Plan(compile=True))
        loops[STEP] = watched_loop(data, folder / "step", Plan(compile="step"))
        marks += [(COMPILED, HAND, MOST_COMPILED), (STEP, HAND, MOST_COMPILED)]
    else:
        skipped.append(f"{COMPILED}: skipped, this machine has no C++ compiler")
    for name, rival in rivals.installed().items():
        loops[name] = rival(*_parts(), data, folder)
    times = _race(loops, rounds, data)
    return Table(
        "Tiny model, logging on",
        f"MLP 64-128-128-10, batch {BATCH}, AdamW, fp32, one thread, TensorBoard every "
        f"{LOG_EVERY} steps.",
        HAND,
        times,
        [Claim.between(times, *mark) for mark in marks],
        skipped,
    )


def _without_logging(rounds: int, data: Stopwatch) -> Table:
    loops = {
        HAND: hand_loop(*_parts(), data, None),
        CHECKED: hand_loop(*_parts(), data, None, checked=True),
        "mpframe": trainer_loop(data),
    }
    return Table(
        "Tiny model, nothing logged",
        "The same without any callback.",
        HAND,
        _race(loops, rounds, data),
    )


def _scalers(rounds: int, data: Stopwatch) -> Table:
    scalers: list[Scaling] = [Static(), Backoff(), LogMax()]
    loops = {type(one).__name__: _passes(_trainer("mixed", one), data) for one in scalers}
    times = _race(loops, rounds, data)
    return Table(
        "Tiny model, the scalers",
        "The same in mixed float16, by the scaler.",
        "Backoff",
        times,
        [Claim.between(times, "LogMax", "Backoff", MOST_LOGMAX)],
    )


def _has_compiler() -> bool:
    """Whether torch.compile finds what it needs on a CPU."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _parts_of_a_step(rounds: int, folder: Path, data: Stopwatch) -> Table:
    trainer, loop = _watched(data, folder / "parts")
    loop()  # The first step makes the optimizer's state.
    parts, steps = watched(trainer), len(data)
    times: dict[str, list[float]] = {"a step": [], **{part: [] for part in parts.seconds}}
    for _ in range(rounds):
        parts.seconds = dict.fromkeys(parts.seconds, 0.0)
        loop()
        for part, seconds in parts.seconds.items():
            times[part].append(seconds / steps)
        times["a step"].append(sum(parts.seconds.values()) / steps)
    setting = "mpframe's steps of the first table; reading the clock is in the times."
    return Table("Tiny model, where a step's time goes", setting, "a step", times)


def _calls(data: Stopwatch) -> Table:
    batch = next(iter(data))
    counts = [
        f"{mode}: {calls_of_a_step(_trainer(mode, Backoff()), batch)}" for mode in ("fp32", "mixed")
    ]
    return Table(
        "Tiny model, Python calls of a step",
        "Calls of functions in mpframe/, outside the casts, with Backoff and no callback.",
        "",
        {},
        notes=counts,
    )


def _trainer(mode: str, scaler: Scaling, plan: Plan | None = None) -> Trainer:
    precision = Precision(mode)
    model, optimizer = precision.prepare(*_parts())
    objective, plan = supervised(nn.CrossEntropyLoss()), plan or Plan()
    kind = CompiledTrainer if plan.compile == "step" else Trainer
    return kind(model, optimizer, objective, precision, scaler=scaler, plan=plan)


def watched_loop(data: Stopwatch, folder: Path, plan: Plan | None = None) -> Loop:
    """The same with what watches a default run, except its progress bar and checkpoints."""
    return _watched(data, folder, plan)[1]


def _watched(data: Stopwatch, folder: Path, plan: Plan | None = None) -> tuple[Trainer, Loop]:
    throughput = Throughput(BATCH)
    callbacks: dict[str, Callback] = {
        "throughput": throughput,
        "amax_record": RecordAmax(),
        "curves": Curves(LOG_EVERY),
        "skip_guard": SkipGuard(limit=50),
    }
    context = RunContext(folder, "", "", Loggers(Tracker(folder)), data, throughput, Results())  # type: ignore[arg-type]
    trainer = _trainer("fp32", None, plan)
    trainer.callbacks = callbacks
    run_callbacks(callbacks, "setup", trainer, context)
    return trainer, _passes(trainer, data)


def trainer_loop(data: Stopwatch) -> Loop:
    """A function that trains one pass with `Trainer.fit`, without callbacks."""
    return _passes(_trainer("fp32", scaler=None), data)


def _passes(trainer: Trainer, data: Stopwatch) -> Loop:
    def loop() -> None:
        trainer.progress.epoch = 0  # The next pass is the first one again.
        trainer.fit(data)

    return loop


def _race(loops: dict[str, Loop], rounds: int, data: Stopwatch) -> dict[str, list[float]]:
    def competitor(name: str, loop: Loop) -> Competitor:
        def turn() -> float:
            loop()
            return data.seconds

        return Competitor(name, turn)

    return race([competitor(name, loop) for name, loop in loops.items()], rounds, warmup=2)


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def _data(steps: int) -> Stopwatch:
    """One log's batches, as many as are measured, and one that ends the last step."""
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        inputs = torch.randn(BATCH, 64, generator=generator)
        return inputs, torch.randint(0, 10, (BATCH,), generator=generator)

    return Stopwatch([batch() for _ in range(LOG_EVERY + steps + 1)], skipped=LOG_EVERY)


THREADS = 2
EVERY = 100
MOST_WITH_REPORTS = 1.10  # times the training without reports
MOST_STEPS = 3.0  # times a step
PLAIN = "step"
REPORT = "step with a report"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model that is measured."""

    name: str  # stands in the table
    make: Callable[[], nn.Module]  # builds the model
    shape: tuple[int, ...]  # of its inputs
    steps: int  # per turn


def range_tables(rounds: int, folder: Path, batch: int = 128, width: int = 64) -> list[Table]:
    """The tiny model and ResNet-18, both `mixed` in float16.

    Args:
        rounds: measured rounds, >= 1.
        folder: records and event files go there.
        batch, width: of ResNet-18.
    """
    cases = [
        Workload("MLP 64-128-128-10", lambda: mlp(64, 10, hidden=128), (64, 64), 20),
        Workload("ResNet-18", lambda: resnet18(10, width=width), (batch, 3, 32, 32), 1),
    ]
    with threads(THREADS):
        return [_of_reports(case, rounds, folder / case.name) for case in cases]


def _of_reports(case: Workload, rounds: int, folder: Path) -> Table:
    data = _batch(case.shape)
    shutil.rmtree(folder, ignore_errors=True)
    plain, watched = _mixed_trainer(case.make), _mixed_trainer(case.make)
    report = _with_reports(watched, folder)
    competing = {
        PLAIN: lambda: plain.train_step(data),
        REPORT: lambda: report(data),
    }
    times = race([Competitor(n, timed(step, case.steps)) for n, step in competing.items()], rounds)
    setting = f"Batch {case.shape[0]}, float16, AdamW, {THREADS} threads."
    claims = [
        Claim.between(times, REPORT, PLAIN, MOST_STEPS),
        Claim(
            f"training with a report in {EVERY} steps / without",
            _spread_out(times),
            MOST_WITH_REPORTS,
        ),
    ]
    return Table(f"Ranges, {case.name}", setting, PLAIN, times, claims)


def _spread_out(times: Times) -> Spread:
    """The cost of a report, spread over the steps between two."""
    low, median, high, count = astuple(ratio(times, REPORT, PLAIN))
    low, median, high = ((EVERY - 1 + value) / EVERY for value in (low, median, high))
    return Spread(low, median, high, count)


def _with_reports(trainer: Trainer, folder: Path) -> Callable[[Batch], Any]:
    watch = RangeWatch(every=1)
    context = RunContext(folder, "", "", Loggers(Tracker(folder)), None, Throughput(1), Results())  # type: ignore[arg-type]
    watch.setup(trainer, context)

    def step(data: Batch) -> None:
        watch.on_step_begin(trainer, [data])
        watch.on_optimizer_step(trainer, trainer.train_step(data))

    return step


def _mixed_trainer(make: Callable[[], nn.Module]) -> Trainer:
    torch.manual_seed(0)
    model, precision = make(), Precision("mixed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, masters = precision.prepare(model, optimizer)
    return Trainer(model, masters, supervised(nn.CrossEntropyLoss()), precision, scaler=Backoff())


def _batch(shape: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(0, 10, (shape[0],), generator=generator)
