"""A model whose activations leave float16, for runs that get into trouble."""

import torch
from torch import Tensor, nn


class Gain(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Overflowing(nn.Module):
    """A classifier of digits with a gain in its middle, and a norm that takes it back."""

    def __init__(
        self, channels: int = 1, image_size: int = 8, classes: int = 10, factor: float = 1e6
    ) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(channels * image_size**2, 32), Gain(factor)
        self.dropout, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(32)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images.flatten(1)))
        return self.head(self.norm(self.dropout(self.gain(hidden))))


class Root(nn.Module):
    """A classifier whose outputs have the root of 0 added."""

    def __init__(self, channels: int = 1, image_size: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(channels * image_size**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.head(images.flatten(1))
        return outputs + (outputs * 0).float().sqrt()


class Steep(Root):
    """One whose gradients overflow at scales above 64 or so."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.head(images.flatten(1))
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * 2.0**12)
        return outputs
