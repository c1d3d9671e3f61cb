"""The doctor's count of gradients against a recount of every element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpframe.numerics.doctor.gradients import GradientRange

HALVES = (torch.float16, torch.bfloat16)


def range_of(*tensors: torch.Tensor) -> GradientRange:
    seen = GradientRange()
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
    assert range_of(values).lost(scale, half) == float(lost)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("largest", [1e-9, 0.3, 1.0, 700.0])
def test_the_best_scale_leaves_one_octave_and_no_two(half: torch.dtype, largest: float) -> None:
    seen = range_of(torch.tensor([largest, -largest / 3]))
    best = seen.best_scale(half)
    assert math.frexp(best)[0] == 0.5
    assert best * seen.amax <= torch.finfo(half).max / 2 < 2 * best * seen.amax


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_best_scale(bad: float) -> None:
    seen = range_of(torch.tensor([bad]), torch.tensor([1.0]))
    assert not math.isfinite(seen.amax)
    assert seen.best_scale(torch.float16) == 2.0**16


def test_nothing_seen_is_nothing_lost() -> None:
    seen = range_of(torch.zeros(3), torch.empty(0))
    assert (seen.amax, seen.lost(1.0, torch.float16)) == (0.0, 0.0)
