"""A generator against a discriminator: two losses over one set of images.

With D(x) the logit that x is real, z noise and G(z) a made image (Goodfellow et al. 2014, the
non-saturating form for G; softplus(a) = log(1 + e^a)):

    L_D = mean softplus(-D(x)) + mean softplus(D(G(z)))
    L_G = mean softplus(-D(G(z)))

The model is called with the loss's name and gives the logits that the loss needs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.data import Dataset

from mpframe.data.datasets.digits import digits
from mpframe.data.task import Loss, Task

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

    def value(self) -> Tensor:
        """0-d float64; nan before the first update."""
        return torch.as_tensor(self._fooled, dtype=torch.float64) / self._seen


def discriminator_loss(outputs: Logits, targets: Tensor) -> Tensor:
    """L_D, 0-d. `outputs`: logits [N, 1] of real and of made images; `targets` is not used."""
    real, made = outputs
    return softplus(-real).mean() + softplus(made).mean()


def generator_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """L_G, 0-d. `outputs`: logits [N, 1] of made images; `targets` is not used."""
    return softplus(-outputs).mean()


def adversarial(train: Dataset[Any], val: Dataset[Any]) -> Task:
    """The task on any images: losses `discriminator` and `generator`, in this order."""
    losses: dict[str, Loss] = {"discriminator": discriminator_loss, "generator": generator_loss}
    return Task(train, val, losses, Fooled)


def digits_gan(
    root: str | None = None,
    channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
    augment: str = "none",
) -> Task:
    """The handwritten digits, to be imitated. Arguments and errors as of `digits`."""
    images = digits(root, channels, image_size, classes, augment)
    return adversarial(images.train, images.val)
