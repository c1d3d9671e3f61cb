"""What a report of the ranges costs (numerics=on): a step with a report beside one without.

One step in a hundred has a report, so the time of training grows by

    (99 + t(step with report) / t(step)) / 100

Hooks, counts, the transfer, the record and the scalars are in it; pictures, which are drawn at the
end of a run and at most once a minute, are not.
"""

import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Competitor, Spread, Times, race, ratio, threads, timed
from bench.table import Claim, Table
from mpframe.core.loss_scaling import Backoff
from mpframe.core.objective import supervised
from mpframe.core.precision import Precision
from mpframe.lab.range_watch import RangeWatch
from mpframe.models import mlp, resnet18
from mpframe.tracking.tracker import Tracker
from mpframe.training.callbacks.results import Results
from mpframe.training.callbacks.throughput import Throughput
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

THREADS = 2
EVERY = 100
MOST = 1.10  # times the training without reports
MOST_STEPS = 3.0  # times a step
PLAIN = "step"
REPORT = "step with a report"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model that is measured.

    Attributes:
        name: stands in the table.
        make: builds the model.
        shape: of its inputs.
        steps: per turn.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int


def tables(rounds: int, folder: Path, batch: int = 128, width: int = 64) -> list[Table]:
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
        return [_table(case, rounds, folder / case.name) for case in cases]


def _table(case: Workload, rounds: int, folder: Path) -> Table:
    data = _batch(case.shape)
    shutil.rmtree(folder, ignore_errors=True)
    plain, watched = _trainer(case.make), _trainer(case.make)
    report = _with_reports(watched, folder)
    competing = {
        PLAIN: lambda: plain.train_step(data),
        REPORT: lambda: report(data),
    }
    times = race([Competitor(n, timed(step, case.steps)) for n, step in competing.items()], rounds)
    setting = f"Batch {case.shape[0]}, float16, AdamW, {THREADS} threads."
    claims = [
        Claim.between(times, REPORT, PLAIN, MOST_STEPS),
        Claim(f"training with a report in {EVERY} steps / without", _spread_out(times), MOST),
    ]
    return Table(f"Ranges, {case.name}", setting, PLAIN, times, claims)


def _spread_out(times: Times) -> Spread:
    """The cost of a report, spread over the steps between two."""
    low, median, high, count = astuple(ratio(times, REPORT, PLAIN))
    low, median, high = ((EVERY - 1 + value) / EVERY for value in (low, median, high))
    return Spread(low, median, high, count)


def _with_reports(trainer: Trainer, folder: Path) -> Callable[[Batch], Any]:
    watch = RangeWatch(every=1)
    context = RunContext(folder, "", "", Tracker(folder), None, Throughput(1), Results())  # type: ignore[arg-type]
    watch.setup(trainer, context)

    def step(data: Batch) -> None:
        watch.on_step_begin(trainer, [data])
        watch.on_optimizer_step(trainer, trainer.train_step(data))

    return step


def _trainer(make: Callable[[], nn.Module]) -> Trainer:
    torch.manual_seed(0)
    model, precision = make(), Precision("mixed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, masters = precision.prepare(model, optimizer)
    return Trainer(model, masters, supervised(nn.CrossEntropyLoss()), precision, scaler=Backoff())


def _batch(shape: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(0, 10, (shape[0],), generator=generator)
