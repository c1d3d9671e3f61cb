"""Accuracy, counted on the device."""

import torch
from torch import Tensor

from mpframe.data.metrics.shapes import require_same_shape


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
        require_same_shape("accuracy", chosen, targets)
        self._hits = self._hits + (chosen == targets).sum()
        self._seen += targets.numel()

    def merge(self, other: "Accuracy") -> None:
        """Take in what another rank has measured."""
        self._hits = self._hits + other._hits
        self._seen += other._seen

    def compute(self) -> Tensor:
        """Hits over samples, 0-d float64; nan before the first update."""
        return torch.as_tensor(self._hits, dtype=torch.float64) / self._seen
