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
        self.first = nn.Linear(channels * image_size**2, 32)
        self.gain = Gain(factor)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images.flatten(1)))
        return self.head(self.norm(self.dropout(self.gain(hidden))))
