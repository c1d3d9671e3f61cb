"""Metrics that count on the device.

An `update` only queues work: the sums are 0-d tensors on the outputs' device, and nothing is read
back before `compute`. The sums start as the number 0, so that the first batch decides the device.
"""

import torch
from torch import Tensor

from mpframe.errors import DataError


class Accuracy:
    """The fraction of samples whose largest logit is the target's, 0 to 1."""

    name = "accuracy"
    higher_is_better = True

    def __init__(self) -> None:
        self._hits: Tensor | int = 0
        self._seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the hits of one batch.

        Args:
            outputs: logits [N, classes, ...], any floating dtype.
            targets: class numbers [N, ...], an integer dtype.

        Raises:
            DataError: the shapes do not belong together.
        """
        chosen = outputs.argmax(dim=1)
        _require_same_shape("accuracy", chosen, targets)
        self._hits = self._hits + (chosen == targets).sum()
        self._seen += targets.numel()

    def compute(self) -> Tensor:
        """Hits over samples, 0-d float64; nan before the first update."""
        return torch.as_tensor(self._hits, dtype=torch.float64) / self._seen


class RMSE:
    """The root of the mean squared error, in the targets' unit:  sqrt(1/n Σ (output - target)²)."""

    name = "rmse"
    higher_is_better = False

    def __init__(self) -> None:
        self._squares: Tensor | float = 0.0
        self._seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the squared errors of one batch, summed in float64.

        Args:
            outputs: predictions, any shape and floating dtype.
            targets: of the same shape.

        Raises:
            DataError: the shapes differ (they would broadcast to N x N errors unnoticed).
        """
        _require_same_shape("rmse", outputs, targets)
        self._squares = self._squares + (outputs.double() - targets.double()).square().sum()
        self._seen += targets.numel()

    def compute(self) -> Tensor:
        """The error so far, 0-d float64; nan before the first update."""
        return (torch.as_tensor(self._squares, dtype=torch.float64) / self._seen).sqrt()


def _require_same_shape(metric: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise DataError(
            f"{metric}: predictions of shape {list(outputs.shape)} against targets of shape "
            f"{list(targets.shape)}; give model and dataset the same shape"
        )
