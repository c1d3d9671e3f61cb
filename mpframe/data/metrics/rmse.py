"""The root of the mean squared error, summed on the device."""

import torch
from torch import Tensor

from mpframe.data.metrics.shapes import require_same_shape


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
        require_same_shape(self.name, outputs, targets)
        errors = self._errors(outputs.double(), targets.double())
        self._squares = self._squares + errors.square().sum()
        self._seen += targets.numel()

    def merge(self, other: "RMSE") -> None:
        """Take in what another rank has measured."""
        self._squares = self._squares + other._squares
        self._seen += other._seen

    def compute(self) -> Tensor:
        """The error so far, 0-d float64; nan before the first update."""
        return (torch.as_tensor(self._squares, dtype=torch.float64) / self._seen).sqrt()

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets
