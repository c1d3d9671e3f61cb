"""A tensor in a scaled format: which values share a scale, the scale, and what quantisation loses.

Values are divided by their scale, rounded to the element format and multiplied again. A scale is
shared by

    tensor   all values
    row      the values that one number of the result is summed over
    block    some values along the axis that is summed over (MX: 32, NVFP4: 16), or with `across` a
             rectangle (128 x 128 in the weights of fp8_blocks, 16 x 16 in NVFP4's)

and held in

    fp32     amax / the format's largest number
    e8m0     a power of two, by one of the rules of `RULES`
    e4m3     amax / the largest number, rounded to e4m3, times one fp32 scale for the tensor
    none     there is no scale
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.core.tree import widest
from mpframe.precision.lowbit.formats import (
    FORMATS,
    Draw,
    ElementFormat,
    round_finite_,
    round_to,
    transform,
)

RULES = ("floor", "ceil", "rceil", "even")
_E4M3 = FORMATS["e4m3fn"]
_MANTISSA, _BIAS = 23, 127  # of fp32
_TINY = torch.finfo(torch.float32).tiny
_SHORT = 16  # values
# Values that fit a cache, and are so many that threads which sleep between ops are seldom woken.
_PIECE = 2**20


@dataclass(frozen=True)
class Quantization:
    """The quantization of one operand of a product, which `recipe.py` reads and checks.

    The rules of e8m0 make the exponent of a scale from amax, the block's largest magnitude. `floor`
    subtracts the exponents of amax and of the format's largest number, so that the largest values
    may saturate (the MX specification). `ceil` first rounds the exponent of amax up. `even` first
    rounds amax to the format's mantissa. `rceil` rounds the exponent of amax / the largest number
    up, so that nothing saturates.
    """

    format: ElementFormat  # of the elements
    per: str = "tensor"  # what shares a scale
    block: int = 32  # values in a block, along the axis that is summed over
    across: int = 1  # values in a block along the other axis
    scale: str = "fp32"  # what holds the scales
    rule: str = "rceil"
    rounding: str = "nearest"  # or `stochastic`, whose mean is the value
    hadamard: int = 0  # block size of a random transform before all this, or 0 for none

    def draws(self, draw: Draw | None) -> Draw | None:
        """Return `draw` if the rounding is stochastic."""
        return draw if self.rounding == "stochastic" else None

    def __str__(self) -> str:
        words = [self.format.name]
        if self.scale != "none":
            size = f" of {self.block} x {self.across}" if self.per == "block" else ""
            words.append(f"{self.scale} scale per {self.per}{size}")
        words += [f"Hadamard {self.hadamard}"] * bool(self.hadamard)
        return " / ".join([*words, *["stochastic"] * (self.rounding == "stochastic")])


@dataclass(frozen=True)
class Axes:
    """The axes that a product sums over (blocks run along the first), and the free one."""

    contracted: tuple[int, ...]
    free: int

    def permute(self, order: Sequence[int]) -> "Axes":
        """Return the same axes of the tensor permuted by `order`."""
        return Axes(tuple(map(order.index, self.contracted)), order.index(self.free))


def quantize(values: Tensor, axes: Axes, how: Quantization, draw: Draw | None = None) -> Tensor:
    """Return the numbers nearest to `values` that the format and the scales can hold, float32.

    `values` are float32, with whole blocks (`Operand.misfit`), and `draw` is for stochastic
    rounding. If a value is inf or nan, its scale is nan and so are all values that share it: an
    overflow stays visible in the product.
    """
    # In the order of memory: a transposed tensor takes three times as long.
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    values, axes = values.permute(order), axes.permute(order)
    values = apply_hadamard(values, axes, how)
    if how.scale == "none":
        quantized = round_to(values, how.format, how.draws(draw))
    else:
        split = find_scales(values, axes, how)
        quantized = round_blocks(split, how, draw).view(values.shape)
    return quantized.permute([order.index(axis) for axis in range(len(order))])


def apply_hadamard(values: Tensor, axes: Axes, how: Quantization) -> Tensor:
    """Apply the Hadamard transform, if there is one."""
    return transform(values, axes.contracted[0], how.hadamard) if how.hadamard else values


@dataclass(frozen=True)
class Scaled:
    """Values and their scales, which broadcast to `blocks` and are nan beside inf and nan."""

    blocks: Tensor  # the values, with separate axes for the values that share a scale
    amax: Tensor  # the largest magnitude
    scale: Tensor
    inverse: Tensor  # the factor before rounding
    whole: Tensor | None  # 0-d, the fp32 factor of the tensor in each scale, if they are in e4m3


def find_scales(values: Tensor, axes: Axes, how: Quantization) -> Scaled:
    """Return the scales of transformed values. It takes the arguments of `quantize`."""
    blocks, shared = _split_blocks(values, axes, how)
    amax, whole = _amax(blocks, shared), None
    if how.scale == "e4m3":
        scale, inverse, whole = _two_scales(amax, how.format)
    elif how.scale == "e8m0":
        scale = _power_of_two(amax, how)
        inverse = scale.reciprocal()
    else:
        scale = (amax * (1.0 / how.format.max)).clamp(min=_TINY)
        inverse = scale.reciprocal()
    finite = amax < torch.inf
    scale, inverse = (factor.where(finite, torch.nan) for factor in (scale, inverse))
    return Scaled(blocks, amax, scale, inverse, whole)


def round_blocks(split: Scaled, how: Quantization, draw: Draw | None) -> Tensor:
    """Divide the blocks by their scales, round, and multiply again."""
    blocks, format, draw = split.blocks, how.format, how.draws(draw)
    if not blocks.is_cpu or blocks.numel() < 2 * _PIECE:
        return round_finite_(blocks * split.inverse, format, draw).mul_(split.scale)
    elements = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    pieces = -(-blocks.numel() // _PIECE)
    factors = split.inverse, split.scale
    shared = (t.expand(len(blocks), *t.shape[1:]).chunk(pieces) for t in factors)
    for values, inverse, scale, out in zip(
        blocks.chunk(pieces), *shared, elements.chunk(pieces), strict=True
    ):
        round_finite_(torch.mul(values, inverse, out=out), format, draw).mul_(scale)
    return elements


def _split_blocks(values: Tensor, axes: Axes, how: Quantization) -> tuple[Tensor, tuple[int, ...]]:
    """Return a view of `values`, and which of its axes share a scale."""
    if how.per == "tensor":
        return values, tuple(range(values.dim()))
    if how.per == "row":
        return values, axes.contracted
    split = {axes.contracted[0]: how.block}
    if how.across > 1:
        split[axes.free] = how.across
    shared: tuple[int, ...] = ()
    for axis in sorted(split, reverse=True):
        values = torch.unflatten(values, axis, (-1, split[axis]))
        shared = (axis + 1, *(other + 1 for other in shared))
    return values, shared


def _amax(blocks: Tensor, shared: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude along some axes, if possible without a copy of the tensor."""
    if len(shared) == blocks.dim():
        return torch.maximum(blocks.amax(shared, keepdim=True), -blocks.amin(shared, keepdim=True))
    if shared == (blocks.dim() - 1,) and blocks.shape[-1] <= _SHORT:
        rows = blocks.abs()  # Reductions along short rows are not vectorised and thrice as slow.
        while rows.shape[-1] % 2 == 0:
            rows = torch.maximum(*rows.chunk(2, -1))
        return rows.amax(-1, keepdim=True)
    high = low = blocks
    for axis in sorted(shared):  # From the outermost: all at once take ten times as long.
        high, low = high.amax(axis, keepdim=True), low.amin(axis, keepdim=True)
    return torch.maximum(high, -low)


def _power_of_two(amax: Tensor, how: Quantization) -> Tensor:
    """Return 2^exponent, at least 2^-126, as e8m0's 2^-127 is subnormal in fp32, or counts as 0."""
    format = how.format
    if how.rule == "rceil":
        exponent = _round_up(amax / format.max)
    elif how.rule == "ceil":
        exponent = _round_up(amax) - format.max_exponent
    else:
        half_unit = 1 << (_MANTISSA - 1 - format.mantissa_bits) if how.rule == "even" else 0
        exponent = ((amax.view(torch.int32) + half_unit) >> _MANTISSA) - format.max_exponent
    return (exponent.clamp(1, 2 * _BIAS) << _MANTISSA).view(torch.float32)


def _round_up(values: Tensor) -> Tensor:
    """Return the biased exponents of the smallest powers of two not below positive values."""
    return (values.view(torch.int32) + ((1 << _MANTISSA) - 1)) >> _MANTISSA


def _two_scales(amax: Tensor, format: ElementFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3 scales of blocks, times an fp32 scale that makes the largest of them 448."""
    smallest = 2.0**_E4M3.min_exponent
    # Large enough that no inverse overflows.
    whole = (amax.amax() / (_E4M3.max * format.max)).clamp(min=_TINY / smallest)
    wanted = (amax / format.max / whole).clamp(smallest, _E4M3.max)
    blocks = round_to(wanted, _E4M3)
    return blocks * whole, whole.reciprocal() / blocks, whole


def count_noise(values: Tensor, quantized: Tensor, axes: Axes, how: Quantization) -> Tensor:
    """Count what a quantisation loses. It takes the arguments and the result of `quantize`.

    Returns [7], the `widest` on the device of `values`: the number of values, the sums of v^2 and
    of (q - v)^2 over values v and their quantised q, how many values are saturated (beyond the
    format's largest number at their scale) and lost (quantised to zero, but not zero), and log2 of
    the largest and of the smallest scale.
    """
    values, kind = apply_hadamard(values, axes, how), widest(values.device)
    lost = (quantized == 0) & (values != 0)
    if how.scale == "none":
        beyond = values.abs() > how.format.max
        highest = lowest = values.new_zeros((), dtype=kind)
    else:
        split = find_scales(values, axes, how)
        beyond = (split.blocks * split.inverse).abs() > how.format.max
        octaves = split.scale.to(kind).log2()
        # A block of zeros has the smallest possible scale, which says nothing.
        highest = octaves.where(split.amax > 0, -math.inf).amax()
        lowest = octaves.where(split.amax > 0, math.inf).amin()
    signal, noise = (t.square().sum(dtype=kind) for t in (values, quantized - values))
    count = torch.full_like(signal, values.numel())
    return torch.stack([count, signal, noise, beyond.sum(), lost.sum(), highest, lowest])
