"""The random Hadamard transform, which spreads an outlier over its block before it is rounded.

Within each block of an axis x becomes x D H: D are fixed random signs, and H is the Hadamard matrix
divided by the root of its size. D H is orthogonal. So if both operands of a product are transformed
along the axis that is summed over, the product is as without, but for rounding.
"""

import math

import torch
from torch import Tensor


def transform(values: Tensor, axis: int, size: int) -> Tensor:
    """`values` (float32) transformed in blocks of `size`, a power of two that divides the axis."""
    blocks = torch.unflatten(values, axis, (-1, size)).movedim(axis + 1, -1)
    mixed = blocks @ matrix(size, values.device)
    return mixed.movedim(-1, axis + 1).flatten(axis, axis + 1)


def matrix(size: int, device: torch.device) -> Tensor:
    """D H of a power of two: orthogonal, float32, the same at each call."""
    rows = torch.ones(1, 1)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    signs = torch.rand(size, 1, generator=torch.Generator().manual_seed(size)) < 0.5
    return (torch.where(signs, -rows, rows) / math.sqrt(size)).to(device)
