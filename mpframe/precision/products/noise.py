"""What quantisation takes from an operand: noise, saturated and lost values, the spread of scales.

A row of numbers is counted on the device for each quantisation; `merged` adds the rows of several,
as of the micro-batches of a step, and `Noise` reads one on the host.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mpframe.precision.products.scaling import Axes, Quantization, scaled, transformed

_SUMS = 5  # count, signal, noise, saturated, lost; after them the highest and the lowest scale


@dataclass(frozen=True)
class Noise:
    """What was counted of one operand of one product.

    Attributes:
        count: values.
        snr_db: 10 log10(sum v^2 / sum (q - v)^2) of values v and their quantised q, in decibels;
            inf without noise, nan beside inf and nan.
        saturated: the share of values beyond the format's largest number at their scale.
        lost: the share of values that are not zero but became zero.
        highest_scale: log2 of the largest scale; 0 if there is none; -inf if all values are 0.
        lowest_scale: of the smallest, likewise; inf if all values are 0.
    """

    count: int
    snr_db: float
    saturated: float
    lost: float
    highest_scale: float = 0.0
    lowest_scale: float = 0.0

    @property
    def scale_spread(self) -> float:
        """Octaves from the smallest to the largest scale; 0 if there is one, or none."""
        spread = self.highest_scale - self.lowest_scale
        return max(spread, 0.0)

    @classmethod
    def of(cls, row: list[float]) -> Self:
        """From the numbers of `measured` or `merged`."""
        count, signal, noise, saturated, lost, highest, lowest = row
        shares = saturated / count, lost / count
        return cls(int(count), _decibels(signal, noise), *shares, highest, lowest)


def measured(
    values: Tensor,
    quantized: Tensor,
    axes: Axes,
    how: Quantization,
    known_amax: Tensor | None = None,
) -> Tensor:
    """Count one quantisation.

    Args:
        values: float32, as given to `quantize`.
        quantized: what it returned.
        axes: as given to it, like the rest.
        how: as above.
        known_amax: as above.

    Returns:
        7 numbers, float64, on the device of `values`.
    """
    values = transformed(values, axes, how)
    lost = (quantized == 0) & (values != 0)
    if how.scale == "none":
        beyond = values.abs() > how.format.max
        highest = lowest = values.new_zeros((), dtype=torch.float64)
    else:
        own = scaled(values, axes, how, known_amax)
        beyond = (own.blocks * own.inverse).abs() > how.format.max
        octaves = own.scale.double().log2()
        # A block of zeros has the smallest scale that there is, and says nothing.
        highest = octaves.where(own.amax > 0, -math.inf).amax()
        lowest = octaves.where(own.amax > 0, math.inf).amin()
    signal, noise = (t.square().sum(dtype=torch.float64) for t in (values, quantized - values))
    count = torch.full_like(signal, values.numel())
    return torch.stack([count, signal, noise, beyond.sum(), lost.sum(), highest, lowest])


def merged(one: Tensor, other: Tensor) -> Tensor:
    """The row of both together."""
    ends = torch.maximum(one[_SUMS], other[_SUMS]), torch.minimum(one[-1], other[-1])
    return torch.cat([one[:_SUMS] + other[:_SUMS], torch.stack(ends)])


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else math.nan
