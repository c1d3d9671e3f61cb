"""The doctor's histogram of gradients against a recount of every element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpframe.lab.exponents import ExponentHistogram

HALVES = (torch.float16, torch.bfloat16)


def range_of(*tensors: torch.Tensor) -> ExponentHistogram:
    seen = ExponentHistogram()
    for tensor in tensors:
        seen.add(tensor)
    return seen


@settings(max_examples=200, deadline=None)
@given(st.integers(-40, 20), st.integers(-30, 10), st.sampled_from(HALVES), st.integers(0, 9))
def test_the_lost_share_is_that_of_a_cast(
    log2_scale: int, log2_size: int, half: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(500, generator=generator) * 2.0**log2_size
    values[::7] = 0.0
    scale = 2.0**log2_scale
    # At a scale that is a power of two the limit lies between two octaves: the counts are equal,
    # but for values on the limit, of which random ones have none.
    nonzero = values[values != 0].double()
    lost = ((nonzero * scale).float().to(half) == 0).double().mean()
    assert range_of(values).lost_fraction(scale, half) == float(lost)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_in_amax(bad: float) -> None:
    seen = range_of(torch.tensor([bad]), torch.tensor([1.0]))
    assert not math.isfinite(seen.amax)
    assert int(seen.counts.sum()) == 1


def test_nothing_seen_is_nothing_lost() -> None:
    seen = range_of(torch.zeros(3), torch.empty(0))
    assert (seen.amax, seen.lost_fraction(1.0, torch.float16)) == (0.0, 0.0)
