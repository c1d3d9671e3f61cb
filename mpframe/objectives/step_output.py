"""What an objective is, and what it returns."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What an objective returns for one batch.

    Attributes:
        loss: one floating-point number, 0-d, unscaled; the mean over `count` samples or labels.
        outputs: what a metric is given, in fp32; None: nothing.
        targets: what a metric compares the outputs with.
        count: how many samples (or tokens) the loss is the mean of: a whole number >= 0, or a 0-d
            tensor >= 0 on the device. Micro-batches and ranks, and the batches of an evaluation,
            are weighed by it; one that counts 0 is left out. None: the size of the batch's first
            tensor along dimension 0.
    """

    loss: Tensor
    outputs: Any = None
    targets: Any = None
    count: Tensor | int | None = None


class Objective(Protocol):
    """Computes the loss of a model on a batch."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Forward pass and loss. Runs inside the cast block of the run's precision.

        Args:
            model: on its device; the objective calls it, or parts of it, as it likes.
            batch: any pytree of tensors on the same device, as the loader gave it.
        """
