"""A trainer of a model, prepared in a mode, and what it may be given in place of a loader."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD

from mpframe import Precision, Trainer
from mpframe.core.objective import supervised


class Batches(list[Any]):
    """Batches in place of a loader."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(self[start:])


def prepared(
    model: nn.Module, objective: Any, mode: str = "fp32", half: str = "float16",
    optimizer: Any = None, cls: Any = Trainer, **rest: Any,
) -> Trainer:  # fmt: skip
    """Takes an objective, or a loss of outputs and targets; SGD by default."""
    precision, make = Precision(mode, half), optimizer or partial(SGD, lr=0.1)
    model, wrapped = precision.prepare(model, make(model.parameters()))
    objective = supervised(objective) if isinstance(objective, nn.Module) else objective
    return cls(model, wrapped, objective, precision, **rest)  # type: ignore[no-any-return]
