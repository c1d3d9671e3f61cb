"""The root of the mean squared relative error, summed on the device."""

import torch
from torch import Tensor

from mpframe.data.metrics.shapes import require_same_shape


class RMSPE:
    """The root of the mean squared relative error:  sqrt(1/n Σ ((output - target) / target)²).

    It has no unit; 0.1 is an error of ten percent. Outputs and targets are in the target's own
    unit, not its logarithm.
    """

    name = "rmspe"
    higher_is_better = False

    def __init__(self) -> None:
        self._squares: Tensor | float = 0.0
        self._seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the squared relative errors of one batch, summed in float64.

        Args:
            outputs: predictions, any shape and floating dtype.
            targets: of the same shape, not 0; one that is 0 makes the metric inf or nan.

        Raises:
            DataError: the shapes differ.
        """
        require_same_shape("rmspe", outputs, targets)
        wanted = targets.double()
        self._squares = self._squares + ((outputs.double() - wanted) / wanted).square().sum()
        self._seen += targets.numel()

    def compute(self) -> Tensor:
        """The error so far, 0-d float64; nan before the first update."""
        return (torch.as_tensor(self._squares, dtype=torch.float64) / self._seen).sqrt()
