"""The doctor's count of gradients by exponent against a recount of every element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpframe.lab.exponents import (
    FIELDS,
    Limits,
    add_rows,
    amax_of,
    count_exponents,
    lost_fraction,
)

HALVES = (torch.float16, torch.bfloat16)


def range_of(*tensors: torch.Tensor) -> torch.Tensor:
    return add_rows([count_exponents(tensor, Limits.of(torch.float16)) for tensor in tensors])


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
    assert lost_fraction(range_of(values), scale, half) == float(lost)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_in_amax(bad: float) -> None:
    seen = range_of(torch.tensor([bad]), torch.tensor([1.0]))
    assert not math.isfinite(amax_of(seen))
    assert int(seen[len(FIELDS) :].sum()) == 1


def test_nothing_seen_is_nothing_lost() -> None:
    seen = range_of(torch.zeros(3), torch.empty(0))
    assert (amax_of(seen), lost_fraction(seen, 1.0, torch.float16)) == (0.0, 0.0)


def test_the_entries_of_a_sparse_tensor_are_counted() -> None:
    places, entries = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 5.0])
    sparse = torch.sparse_coo_tensor(places, entries, (9,), check_invariants=True)
    assert torch.equal(range_of(sparse), range_of(torch.tensor([3.0, 5.0])))
