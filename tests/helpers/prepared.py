"""A trainer of a model, prepared in a mode, and the context of a run that there is none of."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import SGD

from mpframe import Precision, Trainer
from mpframe.core.objective import supervised
from mpframe.tracking.logger import Loggers
from mpframe.tracking.tracker import Tracker
from mpframe.training.results import Results, Throughput
from mpframe.training.run_context import RunContext


def prepared(
    model: nn.Module, objective: Any, mode: str | Precision = "fp32", half: str = "float16",
    optimizer: Any = None, cls: Any = Trainer, **rest: Any,
) -> Trainer:  # fmt: skip
    """Takes an objective, or a loss of outputs and targets; SGD by default.

    mode: with `half`, or a Precision in their place.
    """
    precision = mode if isinstance(mode, Precision) else Precision(mode, half)
    make = optimizer or partial(SGD, lr=0.1)
    model, wrapped = precision.prepare(model, make(model.parameters()))
    objective = supervised(objective) if isinstance(objective, nn.Module) else objective
    return cls(model, wrapped, objective, precision, **rest)  # type: ignore[no-any-return]


def context(folder: Path, tracker: Tracker | None = None, train: Any = None) -> RunContext:
    loggers: Any = Loggers(tracker) if tracker else None
    return RunContext(folder, "seed: 0\n", "a run", loggers, train, Throughput(1), Results())


class Batches(list[Any]):
    """Batches in place of a loader."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(self[start:])
