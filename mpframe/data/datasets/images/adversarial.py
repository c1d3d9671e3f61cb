"""Images to imitate, by a generator against a discriminator (objectives/adversarial.py)."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.images.digits import digits
from mpframe.data.task import Task
from mpframe.objectives import Objective
from mpframe.objectives.adversarial import discriminator_objective, generator_objective

Logits = tuple[Tensor, Tensor]


class Fooled:
    """The fraction of made images that the discriminator takes for real, 0 to 1."""

    name = "fooled"
    higher_is_better = True

    def __init__(self) -> None:
        self._fooled: Tensor | int = 0
        self._seen = 0

    def update(self, outputs: Logits, targets: Tensor) -> None:
        """Count one batch.

        Args:
            outputs: logits [N, 1] of real and of made images.
            targets: not used.
        """
        _, made = outputs
        self._fooled = self._fooled + (made > 0).sum()
        self._seen += made.numel()

    def compute(self) -> Tensor:
        """0-d float64; nan before the first update."""
        return torch.as_tensor(self._fooled, dtype=torch.float64) / self._seen


def adversarial(train: Dataset[Any], val: Dataset[Any], test: Dataset[Any] | None = None) -> Task:
    """The task on any images: objectives `discriminator` and `generator`, in this order."""
    objectives: dict[str, Objective] = {
        "discriminator": discriminator_objective,
        "generator": generator_objective,
    }
    return Task(train, val, objectives, Fooled, test=test)


def digits_gan(
    root: str | None = None,
    channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
    augment: str = "none",
) -> Task:
    """The handwritten digits, to be imitated. Arguments and errors as of `digits`."""
    images = digits(root, channels, image_size, classes, augment)
    return adversarial(images.train, images.val, images.test)
