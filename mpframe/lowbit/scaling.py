"""A tensor in a scaled format: which values share a scale, what the scale is, and what remains.

Values are divided by their scale, rounded to the element format and multiplied again. Those that
share a scale are

    tensor   all values
    row      those that one number of the result is summed over
    block    so many along the axis that is summed over (MX: 32, NVFP4: 16); with `across`, a
             rectangle: 128 x 128 in the weights of fp8_blocks, 16 x 16 in those of NVFP4

and the scale itself is held in

    fp32     amax / the format's largest number
    e8m0     a power of two, by one of the rules of `RULES`
    e4m3     amax / the largest number, rounded to e4m3, times one fp32 scale for the tensor
    none     there is no scale
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.lowbit.formats import FORMATS, Draw, ElementFormat, round_finite_, round_to, transform

PER = ("tensor", "row", "block")
SCALES = ("fp32", "e8m0", "e4m3", "none")
RULES = ("floor", "ceil", "rceil", "even")
ROUNDINGS = ("nearest", "stochastic")
_E4M3 = FORMATS["e4m3fn"]
_MANTISSA, _BIAS = 23, 127  # of fp32
_TINY = torch.finfo(torch.float32).tiny
_SHORT = 16  # values
# Values: few enough for a cache, and so many that threads which sleep between ops are woken seldom.
_PIECE = 2**20


@dataclass(frozen=True)
class Quantization:
    """How one operand of a product is quantised. `recipe.py` reads and checks it.

    The rules of e8m0 round the exponent of a scale. With amax the largest magnitude of the block:
    `floor` takes the exponent of amax less that of the format's largest number, so that the largest
    values may saturate (the MX specification); `ceil` rounds that of amax up first; `even` is as
    floor, of amax rounded to the format's mantissa; `rceil` rounds up that of amax / the largest
    number, so that nothing saturates.
    """

    format: ElementFormat  # of the elements
    per: str = "tensor"  # what shares a scale
    block: int = 32  # values in a block, along the axis that is summed over
    across: int = 1  # values in a block along the other axis
    scale: str = "fp32"  # what holds the scales
    rule: str = "rceil"
    rounding: str = "nearest"  # or `stochastic`, whose mean is the value
    hadamard: int = 0  # size of the blocks of a random transform before all this; 0: none
    history: int = 0  # take the largest amax of so many optimizer steps before; 0: its own
    margin: int = 0  # octaves that are left free above the largest value of the history

    def draws(self, draw: Draw | None) -> Draw | None:
        """Return `draw` if the rounding is stochastic."""
        return draw if self.rounding == "stochastic" else None

    def __str__(self) -> str:
        words = [self.format.name]
        if self.scale != "none":
            size = f" of {self.block} x {self.across}" if self.per == "block" else ""
            words.append(f"{self.scale} scale per {self.per}{size}")
        words += [f"amax of {self.history} steps"] * bool(self.history)
        words += [f"Hadamard {self.hadamard}"] * bool(self.hadamard)
        return " / ".join([*words, *["stochastic"] * (self.rounding == "stochastic")])


@dataclass(frozen=True)
class Axes:
    """The axes that a product sums over (blocks run along the first), and the free one."""

    contracted: tuple[int, ...]
    free: int

    def permuted(self, order: Sequence[int]) -> "Axes":
        """Return the same axes of the tensor permuted by `order`."""
        return Axes(tuple(map(order.index, self.contracted)), order.index(self.free))

    def misfit(self, shape: torch.Size, how: Quantization, groups: int = 1) -> str:
        """Say why a tensor of this shape has no whole blocks; empty if it has.

        `groups` are a convolution's: each sums over its part of the first contracted axis.
        """
        if not shape.numel():
            return "it is empty"
        blocked = how.per == "block" and how.scale != "none"
        along = max(how.hadamard, how.block if blocked else 1)
        for length, block in (
            (shape[self.contracted[0]] // groups, along),
            (shape[self.free], how.across if blocked else 1),
        ):
            if length % block:
                return f"{length} is no multiple of {block}"
        return ""


def quantize(
    values: Tensor,
    axes: Axes,
    how: Quantization,
    draw: Draw | None = None,
    known_amax: Tensor | None = None,
) -> Tensor:
    """Return the numbers nearest to `values` that the format and the scales can hold, float32.

    If a value is inf or nan, its scale is nan and so are all values that share it: an overflow
    stays visible in the product.

    Args:
        values: float32, with whole blocks (`Axes.misfit`); not changed.
        axes: of this operand in the product.
        how: format, scales and rounding.
        draw: the random numbers of stochastic rounding.
        known_amax: 0-d; the amax that a tensor's scale is made from instead of its own.
    """
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    # As it lies in memory, where a transposed tensor takes three times as long.
    values, axes = values.permute(order), axes.permuted(order)
    values = transformed(values, axes, how)
    if how.scale == "none":
        quantized = round_to(values, how.format, how.draws(draw))
    else:
        quantized = rounded(scaled(values, axes, how, known_amax), how, draw).view(values.shape)
    return quantized.permute([order.index(axis) for axis in range(len(order))])


def transformed(values: Tensor, axes: Axes, how: Quantization) -> Tensor:
    """Return `values`, after the Hadamard transform if there is one."""
    return transform(values, axes.contracted[0], how.hadamard) if how.hadamard else values


@dataclass(frozen=True)
class Scaled:
    """Values, and the scales that some of them share; nan beside inf and nan."""

    blocks: Tensor  # the values, in a shape with axes for what is shared
    amax: Tensor  # the largest magnitude among those that share a scale; broadcasts to `blocks`
    scale: Tensor  # likewise
    inverse: Tensor  # what the values are multiplied by before they are rounded
    whole: Tensor | None  # 0-d, the fp32 factor of the tensor in each scale, if they are in e4m3


def scaled(
    values: Tensor, axes: Axes, how: Quantization, known_amax: Tensor | None = None
) -> Scaled:
    """Return the scales of `values`, float32 and transformed; arguments as of `quantize`."""
    blocks, shared = _blocks(values, axes, how)
    amax = _amax(blocks, shared)
    return Scaled(blocks, amax, *_scale(amax, how, known_amax))


def rounded(split: Scaled, how: Quantization, draw: Draw | None) -> Tensor:
    """Divide the values by their scales, round, and multiply again, in the shape of blocks."""
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


def _blocks(values: Tensor, axes: Axes, how: Quantization) -> tuple[Tensor, tuple[int, ...]]:
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
    """Return the largest magnitude along some axes, if possible without a copy of all."""
    if len(shared) == blocks.dim():
        return torch.maximum(blocks.amax(shared, keepdim=True), -blocks.amin(shared, keepdim=True))
    if shared == (blocks.dim() - 1,) and blocks.shape[-1] <= _SHORT:
        return _amax_of_short_rows(blocks)
    high = low = blocks
    for axis in sorted(shared):  # The outermost first: all at once take ten times as long.
        high, low = high.amax(axis, keepdim=True), low.amin(axis, keepdim=True)
    return torch.maximum(high, -low)


def _amax_of_short_rows(blocks: Tensor) -> Tensor:
    """Reduce by halves: reductions are vectorised along long rows only, and thrice as slow."""
    rows = blocks.abs()
    while rows.shape[-1] % 2 == 0:
        rows = torch.maximum(*rows.chunk(2, -1))
    return rows.amax(-1, keepdim=True)


def _scale(
    amax: Tensor, how: Quantization, known_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `scale`, `inverse` and `whole` of a `Scaled`."""
    finite, whole = amax < torch.inf, None
    if how.scale == "e4m3":
        scale, inverse, whole = _two_scales(amax, how.format)
    elif how.scale == "e8m0":
        scale = _power_of_two(amax, how)
        inverse = scale.reciprocal()
    else:
        largest = amax if known_amax is None else known_amax
        scale = (largest * (2.0**how.margin / how.format.max)).clamp(min=_TINY)
        inverse = scale.reciprocal()
    return torch.where(finite, scale, torch.nan), torch.where(finite, inverse, torch.nan), whole


def _power_of_two(amax: Tensor, how: Quantization) -> Tensor:
    """Return 2^exponent, at least 2^-126: e8m0's 2^-127 is subnormal in fp32, or taken for 0."""
    format = how.format
    if how.rule == "rceil":
        exponent = _rounded_up(amax / format.max)
    elif how.rule == "ceil":
        exponent = _rounded_up(amax) - format.max_exponent
    else:
        half_unit = 1 << (_MANTISSA - 1 - format.mantissa_bits) if how.rule == "even" else 0
        exponent = ((amax.view(torch.int32) + half_unit) >> _MANTISSA) - format.max_exponent
    return (exponent.clamp(1, 2 * _BIAS) << _MANTISSA).view(torch.float32)


def _rounded_up(values: Tensor) -> Tensor:
    """Return the biased exponent of the smallest power of two not below a positive value."""
    return (values.view(torch.int32) + ((1 << _MANTISSA) - 1)) >> _MANTISSA


def _two_scales(amax: Tensor, format: ElementFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return an e4m3 scale for each block, times one in fp32 by which their largest is 448."""
    smallest = 2.0**_E4M3.min_exponent
    # At least so large that no inverse overflows.
    whole = (amax.amax() / (_E4M3.max * format.max)).clamp(min=_TINY / smallest)
    wanted = (amax / format.max / whole).clamp(smallest, _E4M3.max)
    blocks = round_to(wanted, _E4M3)
    return blocks * whole, whole.reciprocal() / blocks, whole
