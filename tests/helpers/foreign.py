"""A classifier of digits whose layers are not torch.nn's."""

import torch
from torch import Tensor, nn


class Product(nn.Module):
    """x W + b, in a class of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Foreign(nn.Module):
    """Two products, with what draws random numbers and what has buffers between them."""

    def __init__(self, channels: int = 1, image_size: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.first, self.norm = Product(channels * image_size**2, 32), nn.BatchNorm1d(32)
        self.dropout, self.idle = nn.Dropout(0.2), Product(32, 32)
        self.head = Product(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.first(images.flatten(1))).relu()))


class Lazy(nn.Sequential):
    """A linear classifier that learns the images' size from the first of them."""

    def __init__(self, channels: int = 1, image_size: int = 8, classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(classes))
