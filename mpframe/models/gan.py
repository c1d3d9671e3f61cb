"""A small generative adversarial network: two perceptrons, one that makes and one that judges."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpframe.models.checks import require_sizes
from mpframe.models.mlp import mlp


class Gan(nn.Module):
    """A generator and a discriminator; which of them is to learn is told with each call.

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

    def forward(
        self, images: Tensor, loss: str = "discriminator"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The logits that a loss needs.

        Args:
            images: [N, channels, height, width]; as many are made.
            loss: `discriminator` or `generator`.

        Returns:
            For the discriminator's loss logits [N, 1] of real and of made images; for the
            generator's, of made images.
        """
        made = self.generator(self._noise(images))
        if loss == "generator":
            return self.discriminator(made)  # type: ignore[no-any-return]
        return self.discriminator(images), self.discriminator(made.detach())

    def _noise(self, images: Tensor) -> Tensor:
        """[N, latent] normal numbers; the same in every validation, so that results compare."""
        size = (len(images), self.latent)
        if self.training:
            return torch.randn(size, device=images.device)
        fixed = torch.Generator().manual_seed(0)
        return torch.randn(size, generator=fixed).to(images.device)


def gan(shape: Sequence[int], latent: int = 32, hidden: int = 128) -> nn.Module:
    """A `Gan`."""
    return Gan(shape, latent, hidden)
