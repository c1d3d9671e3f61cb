"""Element formats and their scales, beside ml_dtypes and a slow reference."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from fixtures import Patch
from low_bits import COLUMNS, ML_DTYPES, ROWS, by_ml_dtypes, uniform
from torch import Tensor

from mpframe.precision.lowbit import scaling
from mpframe.precision.lowbit.formats import FORMATS, round_to
from mpframe.precision.lowbit.scaling import (
    RULES,
    Axes,
    Quantization,
    apply_hadamard,
    find_scales,
    quantize,
)

NAN = math.nan
FP32 = Quantization(FORMATS["e4m3fn"])
NVFP4 = Quantization(FORMATS["e2m1"], per="block", block=16, scale="e4m3")
NO_SCALE = Quantization(FORMATS["tf32"], scale="none")
TF32 = FORMATS["tf32"]
PATTERNS = torch.arange(-(2**15), 2**15).to(torch.int16)
FLOAT16, BFLOAT16 = (PATTERNS.view(dtype).float() for dtype in (torch.float16, torch.bfloat16))
RANDOM = np.random.default_rng(0).integers(2**32, size=2**16, dtype=np.uint32).view(np.float32)
HALVES = torch.cat([FLOAT16, BFLOAT16])  # with all numbers of the smaller formats, and all ties
BESIDE = [torch.nextafter(HALVES, torch.tensor(end)) for end in (-math.inf, math.inf)]
VALUES = torch.cat([HALVES, *BESIDE, torch.from_numpy(RANDOM)])


def mx(name: str, rule: str = "rceil", block: int = 32) -> Quantization:
    return Quantization(FORMATS[name], per="block", block=block, scale="e8m0", rule=rule)


def values(*shape: int) -> Tensor:
    """Normal numbers over 20 octaves, with a row and a column of zeros."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(shape, generator=generator)
    made *= torch.exp2(20 * torch.rand(shape, generator=generator) - 12)
    made[0], made[:, 0] = 0.0, 0.0
    return made


def slow_mx(x: Tensor, name: str, rule: str) -> Tensor:
    """Row by row, block by block, in float64 and by the words of the rules."""
    f, out = FORMATS[name], torch.zeros(x.shape)
    for row, start in product(range(x.shape[0]), range(0, x.shape[1], 32)):
        block = x[row, start : start + 32]
        if not (amax := float(block.abs().max())):
            continue
        octave = math.floor(math.log2(amax))
        exact = {
            "floor": octave - f.max_exponent,
            "ceil": math.ceil(math.log2(amax)) - f.max_exponent,
            "rceil": math.ceil(math.log2(amax / f.max)),
            "even": math.floor(math.log2(amax + 2.0 ** (octave - f.mantissa_bits - 1)))
            - f.max_exponent,
        }
        scale = 2.0 ** exact[rule]
        out[row, start : start + 32] = by_ml_dtypes(block / scale, name) * scale
    return out


@pytest.mark.parametrize(
    ("name", "rule"),
    [("e4m3fn", "floor"), ("e5m2", "ceil"), ("e2m3", "rceil"), ("e3m2", "even"),
     *(("e2m1", rule) for rule in RULES)],
)  # fmt: skip
def test_mx_equals_the_slow_reference_along_both_axes(name: str, rule: str) -> None:
    x = values(8, 64)
    assert torch.equal(quantize(x, ROWS, mx(name, rule)), slow_mx(x, name, rule))
    assert torch.equal(quantize(x.t(), COLUMNS, mx(name, rule)), slow_mx(x, name, rule).t())


def test_nvfp4_by_its_words() -> None:
    x = values(8, 32)
    g = x.abs().max() / np.float32(448 * 6)
    for row, start in product(range(8), (0, 16)):
        block = x[row, start : start + 16]
        b = by_ml_dtypes((block.abs().max() / 6 / g).clamp(2.0**-6, 448), "e4m3fn")
        expected = by_ml_dtypes(block * ((1 / g) / b), "e2m1") * (b * g)
        assert torch.equal(quantize(x, ROWS, NVFP4)[row, start : start + 16], expected)


def test_scales_of_squares_tensors_rows_columns_and_rectangles() -> None:
    """Those of squares are the same for a weight and its transpose."""

    def scales(axes: Axes, how: Quantization) -> Tensor:
        return find_scales(x, axes, how).scale.squeeze()

    square, x = replace(NVFP4, across=16), values(32, 48)
    assert torch.equal(quantize(x, ROWS, square), quantize(x, COLUMNS, square))
    assert (scales(ROWS, square).shape, scales(COLUMNS, NVFP4).shape) == ((2, 3), (2, 48))
    x, row = values(4, 8), replace(FP32, per="row")
    for axes, how, amax in (
        (ROWS, FP32, x.abs().max()),
        (ROWS, row, x.abs().amax(1)),
        (COLUMNS, row, x.abs().amax(0)),
        (ROWS, replace(row, per="block", block=4, across=2), x.view(2, 2, 2, 4).abs().amax((1, 3))),
    ):
        assert torch.equal(scales(axes, how), (amax * (1 / 448)).clamp(min=2**-126))
    scale = scales(ROWS, FP32)
    assert torch.equal(quantize(x, ROWS, FP32), by_ml_dtypes(x * (1 / scale), "e4m3fn") * scale)


@pytest.mark.parametrize(
    "how",
    [FP32, Quantization(FORMATS["e5m2"], per="row"), replace(FP32, per="block", block=16),
     *(mx("e2m1", rule, block=16) for rule in RULES), NVFP4, NO_SCALE],
)  # fmt: skip
def test_zeros_the_ends_of_fp32_and_what_is_not_finite(how: Quantization) -> None:
    assert torch.equal(quantize(torch.zeros(4, 32), ROWS, how), torch.zeros(4, 32))
    for exponent in (-149, -130, 126):
        x = values(4, 32) * 2.0**-40
        x[2, 3] = 2.0**exponent
        assert quantize(x, ROWS, how).isfinite().all()
    for bad in (math.inf, -math.inf, NAN):
        x[2, 3] = bad
        quantized = quantize(x, ROWS, how)
        assert not quantized[2, 3].isfinite()
        assert quantized[2, :16].isnan().all() or how is NO_SCALE  # They share a scale.


def test_the_transform_cancels_in_a_product() -> None:
    """Exactly so for size 16, whose entries are 1/4, and small whole numbers."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (5, 32), generator=generator).float()
    b = torch.randint(-8, 9, (32, 3), generator=generator).float()
    how = replace(NO_SCALE, hadamard=16)
    assert torch.equal(apply_hadamard(a, ROWS, how) @ apply_hadamard(b, COLUMNS, how), a @ b)
    outlier = 100.0 * torch.eye(16)[3:4]
    spread = quantize(outlier, ROWS, replace(NVFP4, hadamard=16))
    assert torch.equal(spread.abs(), torch.full((1, 16), 25.0))


@pytest.mark.parametrize(
    "how",
    [replace(FP32, per="row"), mx("e4m3fn", "floor"), replace(mx("e4m3fn"), across=48),
     replace(NVFP4, across=16), NVFP4, mx("e2m1", block=12), replace(NVFP4, hadamard=16), NO_SCALE],
)  # fmt: skip
def test_any_layout_and_any_number_of_pieces_give_the_same(how: Any, monkeypatch: Patch) -> None:
    x, axes = values(96, 96, 2, 3), Axes((1, 2, 3), 0)
    expected = quantize(x, axes, how)
    last = x.contiguous(memory_format=torch.channels_last)
    for other in (last, x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
        assert other.stride() != x.stride()
        assert torch.equal(quantize(other, axes, how), expected)
    x = values(96, 192)
    for rounding, axes in product(("nearest", "stochastic"), (ROWS, COLUMNS)):
        rounded = replace(how, rounding=rounding)
        whole = quantize(x, axes, rounded, uniform())
        with monkeypatch.context() as patched:
            patched.setattr(scaling, "_PIECE", 1000)
            assert torch.equal(quantize(x, axes, rounded, uniform()), whole)


def test_the_largest_of_short_rows() -> None:
    for size in (1, 10, 16, 17):
        x = values(4, 3, size)
        assert torch.equal(scaling._amax(x, (2,)), x.abs().amax(2, keepdim=True))
        x[1, 1, size // 2] = NAN
        assert scaling._amax(x, (2,)).isnan().sum() == 1


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, the sign of zero too; nan for nan."""
    bits = (own.nan_to_num(1.0).view(torch.int32) for own in (ours, theirs))
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_half_its_neighbours_and_any_fp32_value_as_ml_dtypes(name: str) -> None:
    own, their = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    given = VALUES.clone()
    assert same(round_to(given, own), by_ml_dtypes(VALUES, name))
    assert same(given, VALUES)
    limits = (their.max, their.smallest_normal, their.smallest_subnormal)
    subnormal = own.min_exponent - own.mantissa_bits
    assert (own.max, 2.0**own.min_exponent, 2.0**subnormal) == tuple(map(float, limits))


def test_tf32_rounds_at_the_tenth_bit() -> None:
    """Beside float64, in which the step of a value's octave divides it without an error.
    It saturates, but shows what is not finite."""
    ties = (VALUES.view(torch.int32) & ~0x1FFF | 0x1000).view(torch.float32)
    values = torch.cat([VALUES, ties[ties.isfinite()]])
    step = torch.exp2(torch.frexp(values.double())[1].clamp(min=-125) - 1.0 - 10.0)
    held = (torch.round(values / step) * step).clamp(-TF32.max, TF32.max)
    assert same(round_to(values, TF32), torch.where(values.isfinite(), held.float(), values))


@pytest.mark.parametrize("name", ["tf32", "e4m3fn", "e2m1"])
def test_stochastic_rounding_gives_a_neighbour_and_the_mean_is_the_value(name: str) -> None:
    """Of n draws of an event of probability p the mean is within 5 sqrt(p (1 - p) / n) of p,
    but once in 1.7 million; p (1 - p) <= 1 / 4, in units of the neighbours' distance. And a
    draw has 24 bits: 2^-24 more."""
    n, own, generator = 4096, FORMATS[name], torch.Generator().manual_seed(1)
    low, high = (
        partial(round_to, format=own, draw=partial(torch.full_like, fill_value=value))
        for value in (0.0, 1 - 2**-24)
    )
    end = 0.97 * min(own.max, 30.0)
    values = torch.linspace(-end, end, 97)
    values = torch.cat([values, values * 2.0**-8])
    many = values.expand(n, -1).contiguous()
    rounded = round_to(many, own, lambda t: torch.rand(t.shape, generator=generator))
    step = (low(values) - high(values)).abs()
    bound = step.double() * (5 * math.sqrt(1 / (4 * n)) + 2.0**-24)
    assert ((rounded.double().mean(0) - values.double()).abs() <= bound).all()
    assert (step > 0).sum() > 90  # Not all values are numbers of the format.
    exact = round_to(FLOAT16, own)
    assert same(round_to(exact, own, torch.rand_like), exact)
    held, finite = FLOAT16.clamp(-own.max, own.max), FLOAT16.isfinite()
    assert (torch.minimum(low(FLOAT16), high(FLOAT16)) <= held)[finite].all()
    assert (torch.maximum(low(FLOAT16), high(FLOAT16)) >= held)[finite].all()
