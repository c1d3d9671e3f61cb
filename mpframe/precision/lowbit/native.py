"""Matrix products by the instructions of a device: `torch.nn.functional.scaled_mm`.

It multiplies the stored elements and applies the scales to the sums. So a product equals the
emulated one except for the order in which fp32 sums are rounded. There are four kinds:

    a scale for the tensor, or for a row    fp8          NVIDIA 8.9 and later, CPUs
    a power of two for 32 values            fp8 (MX)     NVIDIA 10.0 and later
    e4m3 for 16 values, fp32 for all        e2m1 (NVFP4) NVIDIA 10.0 and later

Longer blocks, and blocks across rows, repeat their scale. Formats without an instruction that gives
fp32, such as MXFP4, are emulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from mpframe.core.errors import first_line
from mpframe.precision.lowbit.formats import FORMATS, Draw
from mpframe.precision.lowbit.recipe import OPERANDS, Recipe
from mpframe.precision.lowbit.scaling import (
    Axes,
    Quantization,
    apply_hadamard,
    find_scales,
    round_blocks,
)


@dataclass(frozen=True)
class Parts:
    """An operand of a matrix product on either side, whose rows are summed over."""

    how: Quantization
    elements: Tensor  # float32 [rows, summed], numbers that the format holds
    scales: Tensor  # float32 [rows, blocks of a row], 1 x 1 for a tensor, nan beside inf and nan
    whole: Tensor | None = None  # 0-d float32, the tensor's factor in scales that are in e4m3

    def values(self, free: int = 0) -> Tensor:
        """Return the result of `quantize`, float32 of 2 axes, with the rows along axis `free`."""
        blocks = torch.unflatten(self.elements, 1, (self.scales.shape[1], -1))
        rows = (blocks * self.scales[..., None]).flatten(1)
        return rows if free == 0 else rows.t()


def take_apart(values: Tensor, axes: Axes, how: Quantization, draw: Draw | None = None) -> Parts:
    """Quantise float32 values of 2 axes. It takes the arguments of `quantize`."""
    if values.stride(0) < values.stride(1):
        values, axes = values.t(), axes.permute((1, 0))
    split = find_scales(apply_hadamard(values, axes, how), axes, how)
    elements = round_blocks(replace(split, scale=torch.ones_like(split.scale)), how, draw)
    elements = elements.view(values.shape)
    blocks = values.shape[axes.contracted[0]] // how.block if how.per == "block" else 1
    if axes.free == 0:
        scales = split.scale.reshape(-1, blocks)
    else:
        elements, scales = elements.t(), split.scale.reshape(blocks, -1).t()
    if how.per == "block":
        scales = scales.repeat_interleave(how.across, 0)
    return Parts(how, elements, scales, split.whole)


TENSOR, ROW = ScalingType.TensorWise, ScalingType.RowWise
MX, NVFP4 = ScalingType.BlockWise1x32, ScalingType.BlockWise1x16
_LENGTH = {MX: 32, NVFP4: 16}  # of a block
_CAPABILITY = {TENSOR: (8, 9), ROW: (8, 9), MX: (10, 0), NVFP4: (10, 0)}
_FP8 = {FORMATS["e4m3fn"]: torch.float8_e4m3fn, FORMATS["e5m2"]: torch.float8_e5m2}
_E2M1 = FORMATS["e2m1"]
_ALIGNED = 16  # rows, and bytes in a row, that kernels take at once


def kind_of(how: Quantization) -> ScalingType | None:
    """Return the kind of product that takes such an operand, or None."""
    if how.format in _FP8 and how.scale != "none" and how.per != "block":
        return ROW if how.per == "row" else TENSOR
    if how.format in _FP8 and how.scale == "e8m0" and how.block % _LENGTH[MX] == 0:
        return MX
    nvfp4 = how.format == _E2M1 and how.scale == "e4m3" and how.per == "block"
    return NVFP4 if nvfp4 and how.block % _LENGTH[NVFP4] == 0 else None


def multiply(left: Parts, right: Parts) -> Tensor:
    """Return the product [m, n], float32, of m rows and n columns whose `refusal` is empty."""
    kind = kind_of(left.how)
    assert kind is not None
    kinds, swizzles = [kind], [SwizzleType.SWIZZLE_32_4_4]
    if kind is NVFP4:
        kinds, swizzles = [kind, TENSOR], [*swizzles, SwizzleType.NO_SWIZZLE]
    scales = scales_of(right, kind)
    scales = [scale.t() for scale in scales] if kind is ROW else scales
    layout = swizzles if kind in _LENGTH else None
    rest = scales_of(left, kind), kinds, scales, kinds, layout, layout
    y = F.scaled_mm(codes_of(left), codes_of(right).t(), *rest, output_dtype=torch.float32)
    return y[: len(left.elements), : len(right.elements)].contiguous()


def codes_of(parts: Parts) -> Tensor:
    """Return the stored elements, with zeros up to multiples of 16 rows and bytes in a row."""
    if parts.how.format == _E2M1:
        dtype, stored = torch.float4_e2m1fn_x2, _pack(parts.elements)
    else:
        dtype = _FP8[parts.how.format]
        stored = parts.elements.to(dtype).contiguous().view(torch.uint8)
    rows, length = stored.shape
    return F.pad(stored, (0, -length % _ALIGNED, 0, -rows % _ALIGNED)).view(dtype)


def _pack(elements: Tensor) -> Tensor:
    """Pack codes of e2m1: the sign, and the count of the positive numbers up to the magnitude."""
    levels = elements.new_tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.bucketize(elements.abs(), levels, right=True).to(torch.uint8)
    codes |= elements.signbit().to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def scales_of(parts: Parts, kind: ScalingType) -> list[Tensor]:
    """Return the scales for a product of this kind, with rows padded as by `codes_of`."""
    if kind is TENSOR:
        return [parts.scales.reshape(())]
    if kind is ROW:
        # A column with strides of 1: kernels check both, though they never use the second.
        return [F.pad(parts.scales.flatten(), (0, -len(parts.scales) % _ALIGNED))[:, None]]
    scales = parts.scales.repeat_interleave(parts.how.block // _LENGTH[kind], 1)
    if parts.whole is None:
        return [swizzle(scales.to(torch.float8_e8m0fnu))]
    # e4m3 has so few numbers that even a rounded quotient is nearest to the right one.
    return [swizzle((scales / parts.whole).to(torch.float8_e4m3fn)), parts.whole]


def swizzle(scales: Tensor) -> Tensor:
    """Order one-byte scales [rows, blocks] as tensor cores read them (SWIZZLE_32_4_4), in one row.

    128 rows of 4 scales lie together. Within them the scales of the rows r, r + 32, r + 64 and
    r + 96 are neighbours.
    """
    rows, blocks = scales.shape
    padded = F.pad(scales.contiguous().view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-blocks // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def is_wanted(compute: str, device: torch.device) -> bool:
    """Whether `dtype.compute` asks for instructions, which `auto` does only on GPUs."""
    return compute == "native" or (compute == "auto" and device.type != "cpu")


def refusal(left: Quantization, right: Quantization, device: torch.device) -> str:
    """Say why a device has no product of such operands, or nothing if it has one."""
    kind = kind_of(left)
    if kind is None or kind_of(right) is not kind:
        words = " by ".join(dict.fromkeys(map(str, (left, right))))
        return f"scaled_mm has none with an fp32 result for {words}"
    if device.type == "cuda" and torch.cuda.is_available():
        has, needs = torch.cuda.get_device_capability(device), _CAPABILITY[kind]
        if has < needs:
            return "it needs compute capability {}.{}, and this is {}.{}".format(*needs, *has)
    elif device.type != "cpu":
        return f"scaled_mm is not used on {device.type} here"
    return _try(left, right, device)


def refusals(recipe: Recipe, device: torch.device) -> Mapping[str, str]:
    """Return the products of a recipe that a device does not have, with the reasons."""
    reasons = {
        product: refusal(hows[left], hows[right], device)
        for product, (left, right) in OPERANDS.items()
        if (hows := recipe.products.get(product))
    }
    return {product: reason for product, reason in reasons.items() if reason}


@cache
def _try(left: Quantization, right: Quantization, device: torch.device) -> str:
    """Try a small product and say what is wrong with it, as versions do not tell, or nothing."""
    # The sums are small integers: any order of adding gives the same.
    length = 5 * lcm(left.block, right.block)
    first, second = _sample(left, length, device), _sample(right, length, device)
    try:
        result = multiply(first, second)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # torch says more of a missing op: it lists all of its backends.
        return first_line(error).split(". ")[0].rstrip(".")
    expected = first.values().double() @ second.values().double().t()
    right_numbers = torch.equal(result.double(), expected)
    return "" if right_numbers else "torch's scaled_mm gives wrong numbers for it"


def _sample(how: Quantization, length: int, device: torch.device) -> Parts:
    """Make elements of -1, 0 and 1 and scales of 1, 2 and 4 that fill more than a tile."""
    rows = 144
    numbers = torch.arange(rows * length, device=device).view(rows, length)
    blocks = length // how.block if how.per == "block" else 1
    scales = torch.arange((1 if how.per == "tensor" else rows) * blocks, device=device)
    scales = torch.exp2((scales % 3).float()).view(-1, blocks)
    whole = torch.ones((), device=device) if how.scale == "e4m3" else None
    return Parts(how, ((numbers * numbers // 7) % 3 - 1.0), scales, whole)
