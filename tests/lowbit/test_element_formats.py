"""Rounding to element formats, beside torch's float8 casts and ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mpframe.core.errors import ConfigError
from mpframe.lowbit.formats import FORMATS, ElementFormat, find_format, round_to

ML_DTYPES = {
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}


def every_half(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a 16-bit format, as fp32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, the sign of zero too; nan for nan."""
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.nan_to_num(1.0).view(torch.int32), theirs.nan_to_num(1.0).view(torch.int32)
    )


def by_ml_dtypes(values: Tensor, name: str) -> Tensor:
    """Rounded by ml_dtypes; inf and nan, which it drops where a format has none, as they were."""
    held = values.clamp(-FORMATS[name].max, FORMATS[name].max).nan_to_num(0.0)
    rounded = held.numpy().astype(getattr(ml_dtypes, ML_DTYPES[name])).astype(np.float32)
    return torch.where(values.isfinite(), torch.from_numpy(rounded), values)


HALVES = torch.cat([every_half(dtype) for dtype in (torch.float16, torch.bfloat16)])


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_half_as_ml_dtypes(name: str) -> None:
    assert same(round_to(HALVES, FORMATS[name]), by_ml_dtypes(HALVES, name))


def test_tf32_holds_every_half() -> None:
    assert same(round_to(HALVES, FORMATS["tf32"]), HALVES)


def just_below_one(like: Tensor) -> Tensor:
    return torch.full_like(like, 1 - 2**-24)


bits = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(bits, min_size=1, max_size=200))
def test_any_fp32_value_as_ml_dtypes(patterns: list[int]) -> None:
    values = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))
    for name in ML_DTYPES:
        assert same(round_to(values, FORMATS[name]), by_ml_dtypes(values, name))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ties_go_to_the_even_number(name: str) -> None:
    """Between any two neighbours: half way, and one fp32 step to either side of it."""
    numbers = round_to(every_half(torch.float16), FORMATS[name])
    finite = numbers[numbers.isfinite()].unique()
    middle = (finite[1:] + finite[:-1]) / 2
    below = torch.nextafter(middle, torch.tensor(-math.inf))
    above = torch.nextafter(middle, torch.tensor(math.inf))
    assert torch.equal(round_to(below, FORMATS[name]), finite[:-1])
    assert torch.equal(round_to(above, FORMATS[name]), finite[1:])
    assert same(round_to(middle, FORMATS[name]), by_ml_dtypes(middle, name))


@settings(max_examples=60, deadline=None)
@given(st.lists(bits, min_size=1, max_size=200))
def test_tf32_rounds_at_the_tenth_bit(patterns: list[int]) -> None:
    """Beside float64, in which the step of a value's octave divides it without an error."""
    ties = [bits & ~0x1FFF | 0x1000 for bits in patterns]
    values = torch.from_numpy(np.array(patterns + ties, dtype=np.uint32).view(np.float32))
    values = values[values.isfinite() & (values.abs() <= FORMATS["tf32"].max)]
    exact = values.double()
    step = torch.exp2(torch.frexp(exact)[1].clamp(min=-125) - 1.0 - 10.0)
    expected = (torch.round(exact / step) * step).clamp(-FORMATS["tf32"].max, FORMATS["tf32"].max)
    assert torch.equal(round_to(values, FORMATS["tf32"]).double(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_saturates_but_shows_what_is_not_finite(name: str) -> None:
    most = torch.finfo(torch.float32).max
    values = torch.tensor([most, -most, math.inf, -math.inf, math.nan, 0.0, -0.0])
    largest = FORMATS[name].max
    expected = torch.tensor([largest, -largest, math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert same(round_to(values, FORMATS[name]), expected)
    assert values[0] == most  # The argument is as it was.


def test_limits() -> None:
    found = {name: (f.max, 2.0**f.min_exponent, f.smallest) for name, f in FORMATS.items()}
    del found["tf32"]
    assert found == {
        "e4m3fn": (448.0, 2.0**-6, 2.0**-9),
        "e5m2": (57344.0, 2.0**-14, 2.0**-16),
        "e2m3": (7.5, 1.0, 0.125),
        "e3m2": (28.0, 0.25, 0.0625),
        "e2m1": (6.0, 1.0, 0.5),
    }


@pytest.mark.parametrize("name", ["tf32", "e4m3fn", "e2m1"])
class TestStochastic:
    def test_the_mean_is_the_value(self, name: str) -> None:
        """Of n draws of an event of probability p the mean is within 5 sqrt(p (1 - p) / n) of p,
        but once in 1.7 million; p (1 - p) <= 1 / 4, in units of the neighbours' distance. And a
        draw has 24 bits: 2^-24 more."""
        n = 4096
        generator = torch.Generator().manual_seed(1)
        end = 0.97 * min(FORMATS[name].max, 30.0)
        values = torch.linspace(-end, end, 97)
        values = torch.cat([values, values * 2.0**-8])
        many = values.expand(n, -1).contiguous()
        rounded = round_to(many, FORMATS[name], lambda t: torch.rand(t.shape, generator=generator))
        ends = [
            round_to(values, FORMATS[name], draw) for draw in (torch.zeros_like, just_below_one)
        ]
        step = (ends[0] - ends[1]).abs()
        bound = step.double() * (5 * math.sqrt(1 / (4 * n)) + 2.0**-24)
        assert ((rounded.double().mean(0) - values.double()).abs() <= bound).all()
        assert (step > 0).sum() > 90  # Not all values are numbers of the format.

    def test_gives_a_neighbour_and_leaves_numbers_of_the_format(self, name: str) -> None:
        values = every_half(torch.float16)
        exact = round_to(values, FORMATS[name])
        assert same(round_to(exact, FORMATS[name], torch.rand_like), exact)
        low = round_to(values, FORMATS[name], torch.zeros_like)
        high = round_to(values, FORMATS[name], just_below_one)
        held = values.clamp(-FORMATS[name].max, FORMATS[name].max)
        finite = values.isfinite()
        assert (torch.minimum(low, high) <= held)[finite].all()
        assert (torch.maximum(low, high) >= held)[finite].all()


class TestOwnFormat:
    def test_has_the_numbers_of_its_bits(self) -> None:
        e3m3 = ElementFormat("e3m3", 3, 3)
        numbers = round_to(every_half(torch.float16), e3m3)
        numbers = numbers[numbers.isfinite()].abs().unique()
        assert len(numbers) == 2**6
        assert max(numbers) == e3m3.max == 30.0

    @pytest.mark.parametrize(
        ("bits", "words"),
        [
            ((9, 3), "exponent_bits=9: choose 1 to 8"),
            ((4, 0), "mantissa_bits=0: choose 1 to 10"),
            ((4, 3, "fnuz"), "specials=fnuz: choose inf, nan, none"),
            ((8, 3), "specials=none: with 8 exponent bits choose inf"),
            ((1, 3, "inf"), "no number is left"),
        ],
    )
    def test_refused(self, bits: tuple[int, int], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            ElementFormat("mine", *bits)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"format=e4m3: choose tf32, .*e4m3fn"):
        find_format("e4m3")


def test_compiled_and_fake() -> None:
    values = torch.randn(64, 32) * 100
    compiled = torch.compile(round_to, fullgraph=True, backend="aot_eager")
    for format in (FORMATS["e4m3fn"], FORMATS["tf32"]):
        assert same(compiled(values, format), round_to(values, format))
    with FakeTensorMode():
        assert round_to(torch.empty(3, 4), FORMATS["e2m1"]).shape == (3, 4)
