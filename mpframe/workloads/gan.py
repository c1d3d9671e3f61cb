"""A generative adversarial network: one perceptron makes images and another judges them.

The dataset gives images to imitate, and the model's two parts have an objective each.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

from mpframe.core.objective import Objective, StepOutput, outside_casts
from mpframe.core.tree import to_fp32
from mpframe.data.images import digits
from mpframe.data.task import Task
from mpframe.models import mlp, require_sizes


def discriminator_objective(model: Any, batch: Any) -> StepOutput:
    """L_D; `outputs` are the logits [N, 1] of real and of made images.

    Args:
        model: gives these logits for images; those of made ones have no gradient to the generator.
        batch: its first element is the images [N, ...].
    """
    logits = model(batch[0])
    with outside_casts():
        real, fake = to_fp32(logits)
        loss = softplus(-real).mean() + softplus(fake).mean()
    return StepOutput(loss, outputs=(real, fake), targets=batch[1])


def generator_objective(model: Any, batch: Any) -> StepOutput:
    """L_G; `outputs` are the logits [N, 1] of made images.

    Args:
        model: has the modules `generator` and `discriminator`, and `noise(images)`.
        batch: its first element is the images [N, ...]; as many are made.
    """
    logits = model.discriminator(model.generator(model.noise(batch[0])))
    with outside_casts():
        fake = to_fp32(logits)
        loss = softplus(-fake).mean()
    return StepOutput(loss, outputs=fake, targets=batch[1])


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


class Gan(nn.Module):
    """A generator and a discriminator; an objective for each calls the parts that it needs.

    Args:
        shape: of one image, [channels, height, width].
        latent: numbers of noise that an image is made of.
        hidden: width of the hidden layers.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, shape: Sequence[int], latent: int = 32, hidden: int = 128) -> None:
        super().__init__()
        require_sizes(latent=latent, hidden=hidden, pixels=math.prod(shape))
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(shape)),
            nn.Unflatten(1, tuple(shape)),
        )
        self.discriminator = mlp(list(shape), classes=1, hidden=hidden)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, 1] of the images and of as many made images: the discriminator learns by them.

        Args:
            images: [N, channels, height, width].
        """
        made = self.generator(self.noise(images))
        return self.discriminator(images), self.discriminator(made.detach())

    def noise(self, images: Tensor) -> Tensor:
        """Normal noise [N, latent], a row for each image.

        It is the same in every validation, so that results can be compared.
        """
        size = (len(images), self.latent)
        if self.training:
            return torch.randn(size, device=images.device)
        fixed = torch.Generator().manual_seed(0)
        return torch.randn(size, generator=fixed).to(images.device)


def gan(shape: Sequence[int], latent: int = 32, hidden: int = 128) -> nn.Module:
    """A `Gan`."""
    return Gan(shape, latent, hidden)
