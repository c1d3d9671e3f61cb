"""Rounding to element formats, beside ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_bits import ML_DTYPES, by_ml_dtypes
from torch import Tensor

from mpframe.lowbit.formats import FORMATS, ElementFormat, round_to

TF32, MOST = FORMATS["tf32"], torch.finfo(torch.float32).max
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200)
PATTERNS = torch.arange(-(2**15), 2**15).to(torch.int16)
FLOAT16, BFLOAT16 = (PATTERNS.view(dtype).float() for dtype in (torch.float16, torch.bfloat16))
HALVES = torch.cat([FLOAT16, BFLOAT16])  # with all numbers of the smaller formats, and all ties


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, the sign of zero too; nan for nan."""
    bits = (own.nan_to_num(1.0).view(torch.int32) for own in (ours, theirs))
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_half_as_ml_dtypes(name: str) -> None:
    own, their = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])
    assert same(round_to(HALVES, own), by_ml_dtypes(HALVES, name))
    limits = (their.max, their.smallest_normal, their.smallest_subnormal)
    assert (own.max, 2.0**own.min_exponent, own.smallest) == tuple(map(float, limits))


@settings(max_examples=60, deadline=None)
@given(BITS)
def test_any_fp32_value_as_ml_dtypes(patterns: list[int]) -> None:
    values = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))
    for name in ML_DTYPES:
        assert same(round_to(values, FORMATS[name]), by_ml_dtypes(values, name))


@settings(max_examples=60, deadline=None)
@given(BITS)
def test_tf32_rounds_at_the_tenth_bit(patterns: list[int]) -> None:
    """Beside float64, in which the step of a value's octave divides it without an error."""
    ties = [bits & ~0x1FFF | 0x1000 for bits in patterns]
    values = torch.from_numpy(np.array(patterns + ties, dtype=np.uint32).view(np.float32))
    exact = values[values.isfinite() & (values.abs() <= TF32.max)].double()
    step = torch.exp2(torch.frexp(exact)[1].clamp(min=-125) - 1.0 - 10.0)
    expected = (torch.round(exact / step) * step).clamp(-TF32.max, TF32.max)
    assert torch.equal(round_to(exact.float(), TF32).double(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_saturates_but_shows_what_is_not_finite(name: str) -> None:
    largest, shown = FORMATS[name].max, (math.inf, -math.inf, math.nan, 0.0, -0.0)
    values = torch.tensor([MOST, -MOST, *shown])
    rounded = round_to(values, FORMATS[name])
    assert same(rounded, torch.tensor([largest, -largest, *shown]))
    assert values[0] == MOST  # The argument is as it was.


def just_below_one(like: Tensor) -> Tensor:
    return torch.full_like(like, 1 - 2**-24)


@pytest.mark.parametrize("name", ["tf32", "e4m3fn", "e2m1"])
class TestStochastic:
    def test_the_mean_is_the_value(self, name: str) -> None:
        """Of n draws of an event of probability p the mean is within 5 sqrt(p (1 - p) / n) of p,
        but once in 1.7 million; p (1 - p) <= 1 / 4, in units of the neighbours' distance. And a
        draw has 24 bits: 2^-24 more."""
        n, own, generator = 4096, FORMATS[name], torch.Generator().manual_seed(1)
        end = 0.97 * min(own.max, 30.0)
        values = torch.linspace(-end, end, 97)
        values = torch.cat([values, values * 2.0**-8])
        many = values.expand(n, -1).contiguous()
        rounded = round_to(many, own, lambda t: torch.rand(t.shape, generator=generator))
        low, high = (round_to(values, own, draw) for draw in (torch.zeros_like, just_below_one))
        step = (low - high).abs()
        bound = step.double() * (5 * math.sqrt(1 / (4 * n)) + 2.0**-24)
        assert ((rounded.double().mean(0) - values.double()).abs() <= bound).all()
        assert (step > 0).sum() > 90  # Not all values are numbers of the format.

    def test_gives_a_neighbour_and_leaves_numbers_of_the_format(self, name: str) -> None:
        own, finite = FORMATS[name], FLOAT16.isfinite()
        exact = round_to(FLOAT16, own)
        assert same(round_to(exact, own, torch.rand_like), exact)
        low, high = (round_to(FLOAT16, own, draw) for draw in (torch.zeros_like, just_below_one))
        held = FLOAT16.clamp(-own.max, own.max)
        assert (torch.minimum(low, high) <= held)[finite].all()
        assert (torch.maximum(low, high) >= held)[finite].all()


def test_a_format_of_ones_own_has_the_numbers_of_its_bits() -> None:
    numbers = round_to(FLOAT16, e3m3 := ElementFormat("e3m3", 3, 3))
    numbers = numbers[numbers.isfinite()].abs().unique()
    assert (len(numbers), max(numbers), e3m3.max) == (2**6, 30.0, 30.0)
