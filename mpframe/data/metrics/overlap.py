"""Areas of classes, counted on the device: what `Dice` and `IoU` are made of."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mpframe.data.metrics.shapes import require_same_shape


class Overlap(ABC):
    """The mean of a measure over the classes, of areas summed over all pixels of a validation.

    A class that neither targets nor predictions have is left out, and so is class 0, the
    background, which fills most of a picture.

    Args:
        background: whether class 0 counts as well.
    """

    higher_is_better = True

    def __init__(self, background: bool = False) -> None:
        self._first = 0 if background else 1
        self._counts: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the pixels of one batch.

        Args:
            outputs: logits [N, classes, ...], any floating dtype.
            targets: class numbers [N, ...], an integer dtype.

        Raises:
            DataError: the shapes do not belong together.
        """
        chosen = outputs.argmax(dim=1)
        require_same_shape(type(self).__name__.lower(), chosen, targets)
        classes = outputs.shape[1]
        pairs = (targets * classes + chosen).flatten()
        if self._counts is None:
            self._counts = pairs.new_zeros(classes * classes, dtype=torch.int64)
        # Not bincount: on a GPU it waits for the largest value.
        self._counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int64))

    def merge(self, other: "Overlap") -> None:
        """Take in what another rank has measured."""
        if self._counts is None or other._counts is None:
            self._counts = other._counts if self._counts is None else self._counts
        else:
            self._counts += other._counts

    def compute(self) -> Tensor:
        """The mean so far, 0 to 1, 0-d float64; nan before the first update."""
        if self._counts is None:
            return torch.tensor(torch.nan, dtype=torch.float64)
        counts = self._counts.view(math.isqrt(len(self._counts)), -1).double()
        shared, wanted, chosen = counts.diagonal(), counts.sum(1), counts.sum(0)
        values = self.measure(shared, wanted, chosen)[self._first :]
        return values.nanmean()  # 0 / 0 is a class that occurs nowhere.

    @abstractmethod
    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        """The measure of each class, nan if all three are 0.

        Args:
            shared: [classes] float64, pixels of the class that are predicted as such.
            wanted: pixels of the class.
            chosen: pixels predicted as the class.
        """
