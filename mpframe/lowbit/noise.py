"""Count what one quantisation of an operand loses. `numerics.product_noise` reads the counts."""

import math

import torch
from torch import Tensor

from mpframe.lowbit.scaling import Axes, Quantization, scaled, transformed


def count_noise(
    values: Tensor,
    quantized: Tensor,
    axes: Axes,
    how: Quantization,
    known_amax: Tensor | None = None,
) -> Tensor:
    """Count one quantisation; the arguments are what `quantize` was given and returned.

    Returns:
        [7] float64 on the device of `values`: the number of values; the sums of v^2 and of
        (q - v)^2 over values v and their quantised q; how many values are saturated (beyond the
        format's largest number at their scale), and lost (not zero, but quantised to zero); log2
        of the largest and of the smallest scale.
    """
    values = transformed(values, axes, how)
    lost = (quantized == 0) & (values != 0)
    if how.scale == "none":
        beyond = values.abs() > how.format.max
        highest = lowest = values.new_zeros((), dtype=torch.float64)
    else:
        split = scaled(values, axes, how, known_amax)
        beyond = (split.blocks * split.inverse).abs() > how.format.max
        octaves = split.scale.double().log2()
        # A block of zeros has the smallest scale that there is, and says nothing.
        highest = octaves.where(split.amax > 0, -math.inf).amax()
        lowest = octaves.where(split.amax > 0, math.inf).amin()
    signal, noise = (t.square().sum(dtype=torch.float64) for t in (values, quantized - values))
    count = torch.full_like(signal, values.numel())
    return torch.stack([count, signal, noise, beyond.sum(), lost.sum(), highest, lowest])
