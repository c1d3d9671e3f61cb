"""A small generative adversarial network: one perceptron makes images and another judges them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpframe.models.checks import require_sizes
from mpframe.models.mlp import mlp


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
