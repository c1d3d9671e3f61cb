"""Parts of runs that do not learn: a loss that turns to nan."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.objective import supervised
from mpframe.data.images import digits
from mpframe.data.task import Task


class TurnsNan:
    """Cross-entropy, and nan from one training batch on."""

    def __init__(self, good: int) -> None:
        self._good = good

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            self._good -= 1
        return loss * float("nan") if self._good < 0 else loss


def nan_after(batches: int) -> Task:
    """The digits with a loss that is good for so many training batches."""
    return replace(digits(), objective=supervised(TurnsNan(batches)))


class Loss:
    """A metric that would be written over the validation loss; it measures nothing."""

    name, higher_is_better = "loss", False

    def update(self, outputs: Any, targets: Tensor) -> None: ...
    def compute(self) -> float:
        return 0.0


def named_loss() -> Task:
    """The digits with a metric of that name."""
    return replace(digits(), metric=Loss)


def linear() -> nn.Module:
    """A linear model of the digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
