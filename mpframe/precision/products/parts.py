"""An operand with its elements and its scales apart, as the instructions of a GPU take it.

The numbers are those of `quantize`, which multiplies the two.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.precision.products.formats import Draw
from mpframe.precision.products.scaling import Axes, Quantization, rounded, scaled, transformed


@dataclass(frozen=True)
class Parts:
    """An operand of a matrix product; whichever side it stands on, each row is summed over.

    Attributes:
        how: it was quantised.
        elements: float32 [rows, summed], numbers that the format holds.
        scales: float32 [rows, blocks of a row]; 1 x 1 for a tensor. nan beside inf and nan.
        whole: 0-d float32, the factor of the tensor in each scale that is held in e4m3.
    """

    how: Quantization
    elements: Tensor
    scales: Tensor
    whole: Tensor | None = None

    def values(self, free: int = 0) -> Tensor:
        """What `quantize` gives: float32, of 2 axes; the rows are along the axis `free`."""
        blocks = torch.unflatten(self.elements, 1, (self.scales.shape[1], -1))
        rows = (blocks * self.scales[..., None]).flatten(1)
        return rows if free == 0 else rows.t()


def take_apart(
    values: Tensor,
    axes: Axes,
    how: Quantization,
    draw: Draw | None = None,
    known_amax: Tensor | None = None,
) -> Parts:
    """Quantise `values`, float32 of 2 axes; all arguments are those of `quantize`.

    Args:
        values: of 2 axes.
        axes: as given to `quantize`, like the rest.
        how: with a scale.
        draw: gives the same numbers as there.
        known_amax: as there.
    """
    if values.stride(0) < values.stride(1):
        values, axes = values.t(), axes.permuted((1, 0))
    own = scaled(transformed(values, axes, how), axes, how, known_amax)
    elements = rounded(replace(own, scale=torch.ones_like(own.scale)), how, draw)
    elements = elements.view(values.shape)
    blocks = values.shape[axes.contracted[0]] // how.block if how.per == "block" else 1
    if axes.free == 0:
        scales = own.scale.reshape(-1, blocks)
    else:
        elements, scales = elements.t(), own.scale.reshape(blocks, -1).t()
    if how.per == "block":
        scales = scales.repeat_interleave(how.across, 0)
    return Parts(how, elements, scales, own.whole)
