"""A generative adversarial network: one perceptron makes images and another judges them.

The dataset gives images to imitate. Each part of the model has an objective.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from mpframe.core.casts import outside_casts
from mpframe.core.objective import StepOutput
from mpframe.core.tree import to_fp32
from mpframe.data.images import digits
from mpframe.data.metrics import Mean
from mpframe.data.task import Task
from mpframe.workloads.images import mlp, require_sizes


def discriminator_objective(model: Any, batch: Any) -> StepOutput:
    """Return L_D and, as `outputs`, the logits [N, 1] of real and of made images.

    `model` gives these logits for the images [N, ...], the first element of `batch`.
    """
    logits = model(batch[0])
    with outside_casts():
        real, fake = to_fp32(logits)
        loss = softplus(-real).mean() + softplus(fake).mean()
    return StepOutput(loss, outputs=(real, fake), targets=batch[1])


def generator_objective(model: Any, batch: Any) -> StepOutput:
    """Return L_G and, as `outputs`, the logits [N, 1] of as many made images as the batch has.

    `model` has the modules `generator` and `discriminator`, and `noise(images)`.
    """
    logits = model.discriminator(model.generator(model.noise(batch[0])))
    with outside_casts():
        fake = to_fp32(logits)
        loss = softplus(-fake).mean()
    return StepOutput(loss, outputs=fake, targets=batch[1])


class Fooled(Mean):
    """The fraction of made images that the discriminator takes for real, 0 to 1."""

    name = "fooled"
    higher_is_better = True

    def measure_batch(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Count one batch by the logits [N, 1] of real and of made images."""
        _, made = outputs
        return (made > 0).sum(), made.numel()


def digits_gan(
    root: str | None = None,
    channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
    augment: str = "none",
) -> Task:
    """Return the handwritten digits, to be imitated. Arguments and errors are those in `digits`."""
    images = digits(root, channels, image_size, classes, augment)
    objectives = {"discriminator": discriminator_objective, "generator": generator_objective}
    return Task(images.train, images.val, objectives, Fooled, test=images.test)


class Gan(nn.Module):
    """A generator and a discriminator for images of a shape [channels, height, width].

    An objective for each calls the parts that it needs. See conf/model/gan.yaml.
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
        """Return logits [N, 1] of images [N, C, H, W] and of as many made images, detached."""
        made = self.generator(self.noise(images))
        return self.discriminator(images), self.discriminator(made.detach())

    def noise(self, images: Tensor) -> Tensor:
        """Return normal noise [N, latent], the same in every validation."""
        size = (len(images), self.latent)
        if self.training:
            return torch.randn(size, device=images.device)
        fixed = torch.Generator().manual_seed(0)
        return torch.randn(size, generator=fixed).to(images.device)
