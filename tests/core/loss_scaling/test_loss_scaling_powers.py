"""The largest safe power of two is exact, at the edge and one number beside it."""

import math

import pytest
import torch

from mpframe.training.probe import safe_scale

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("free", [0, 1, 3])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("exponent", [-140, -24, 0, 15])
def test_a_gradient_at_the_edge_still_fits_and_the_next_number_does_not(
    half: torch.dtype, free: int, exponent: int
) -> None:
    edge = math.ldexp(torch.finfo(half).max, exponent - free)  # A power of two moves it exactly.
    assert safe_scale(edge, half, free) == math.ldexp(1.0, -exponent)
    beyond = math.nextafter(edge, math.inf)
    assert safe_scale(beyond, half, free) == math.ldexp(1.0, -exponent - 1)


@pytest.mark.parametrize("half", HALVES)
def test_it_is_the_largest(half: torch.dtype) -> None:
    limit = torch.finfo(half).max
    for amax in torch.rand(1000, dtype=torch.float64, generator=torch.manual_seed(0)).tolist():
        scale = safe_scale(amax, half)
        assert scale * amax <= limit / 2 < 2 * scale * amax
