"""Counts of magnitudes against a recount in float64 on the host, for every kind and format."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpframe.lab.exponents import (
    BINS,
    FIELDS,
    HIGHEST,
    LOWEST,
    Limits,
    add_rows,
    amax_of,
    count_exponents,
    lost_fraction,
)

HALVES = [torch.float16, torch.bfloat16]
FLOAT16 = Limits.of(torch.float16)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65505.0, 2.0**-24, 2.0**-25, 2.0**-26]
SPECIAL += [2.0**-14, 2.0**-14 * (1 - 2.0**-12), 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149, 3e38]

numbers = st.one_of(
    st.sampled_from([*SPECIAL, *(-value for value in SPECIAL)]),
    st.floats(width=32),
    st.builds(lambda m, e: m * 2.0**e, st.floats(1, 2, width=32), st.integers(-40, 17)),
)


def recount(values: Tensor, half: torch.dtype, scale: float) -> list[float]:
    """The same figures by rounding each value alone, in float64 and numpy."""
    x = values.double().numpy().ravel()
    finite, zero = np.isfinite(x), x == 0
    y = x[finite & ~zero].astype(np.float64) * scale
    info = torch.finfo(half)

    def rounds_to_zero(scaled: np.ndarray) -> np.ndarray:
        # Every number of either half format is one of fp32's, so float64 -> half rounds once here.
        steps = np.round(scaled / (info.smallest_normal * info.eps))  # ties to even, as the format
        return np.asarray(steps == 0)

    lost = [rounds_to_zero(y * k) for k in (0.5, 1.0, 2.0)]
    tiny = (np.abs(y) < info.smallest_normal) & ~lost[1]
    counts = [x.size, zero.sum(), (~finite).sum(), *(own.sum() for own in lost), tiny.sum()]
    counts += [(np.abs(y) > info.max).sum(), np.abs(y).max(initial=0.0)]
    bins = np.zeros(BINS)
    for value in np.abs(x[finite & ~zero]):
        bins[max(math.frexp(value)[1] - 1, LOWEST) - LOWEST] += 1
    return [float(count) for count in [*counts, *bins]]


@pytest.mark.parametrize(
    ("stored", "half"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(numbers, max_size=40), exponent=st.integers(-4, 20))
def test_a_float64_recount_agrees(
    stored: torch.dtype, half: torch.dtype, values: list[float], exponent: int
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(stored)
    scale = 2.0**exponent
    # A product beyond fp32 would be inf there and finite in the recount.
    scale = scale if not (tensor.abs()[tensor.isfinite()] * scale).isinf().any() else 1.0
    row = count_exponents(tensor, Limits.of(half), torch.tensor(scale))
    # fp32 products below 2^-149 are rounded: exact where nothing so small is made still smaller.
    if exponent >= 1 or not (tensor.abs()[tensor != 0] < 2.0**-120).any():
        assert row.tolist() == recount(tensor, half, scale)


@pytest.mark.parametrize("half", HALVES)
def test_the_tie_at_half_the_smallest_number_is_lost(half: torch.dtype) -> None:
    info = torch.finfo(half)
    smallest = info.smallest_normal * info.eps
    values = torch.tensor([smallest / 2, smallest * 0.50001, smallest])
    assert values.to(half).count_nonzero() == 2
    row = dict(zip(FIELDS, count_exponents(values, Limits.of(half)).tolist(), strict=False))
    assert (row["lost"], row["subnormal"]) == (1, 2)
    assert (row["lost_at_twice_scale"], row["lost_at_half_scale"]) == (0, 3)


def test_rows_add_up() -> None:
    one, two = torch.randn(50) * 1e-6, torch.randn(3, 7) * 1e5
    both = count_exponents(torch.cat([one, two.ravel()]), FLOAT16, 4.0)
    parts = [count_exponents(part, FLOAT16, 4.0) for part in (one, two, torch.empty(0, 3))]
    assert torch.equal(add_rows(parts), both)
    assert not parts[-1].any()


def test_every_finite_number_has_its_bin() -> None:
    values = torch.tensor([2.0**e for e in range(-126, HIGHEST + 1)])
    bins = count_exponents(values, Limits.of(torch.bfloat16))[len(FIELDS) :]
    assert bins[1:].tolist() == [1.0] * (BINS - 1)
    assert bins[0] == 0


@pytest.mark.parametrize("stored", HALVES)
def test_many_values_of_a_format_are_counted_as_few(stored: torch.dtype) -> None:
    """All numbers of the format, and more of some than of others: in one call, and in parts."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(stored)
    values = torch.cat([every, torch.randn(2**16).to(stored), every[2**14 : 2**14 + 999]])
    scale, held_at = torch.tensor(2.0**8), torch.tensor(2.0**3)
    parts = [count_exponents(p, FLOAT16, scale, held_at) for p in values.split(2**15)]
    whole = count_exponents(values, FLOAT16, scale, held_at)
    assert torch.equal(whole, add_rows(parts))
    assert whole[FIELDS.index("count")] == len(values)


def test_many_values_of_fp32_are_counted_in_parts() -> None:
    values = torch.randn(2**17 + 5) * 1e-4
    values[-1], values[7] = 1e6, torch.nan
    assert count_exponents(values, FLOAT16, 2.0).tolist() == recount(values, torch.float16, 2.0)


def test_the_largest_is_among_what_is_there() -> None:
    row = count_exponents(torch.full((2**16,), 3.0, dtype=torch.float16), FLOAT16, 2.0)
    assert row[FIELDS.index("amax")] == 6.0


def test_what_is_held_at_a_scale_is_divided_by_it() -> None:
    values = torch.randn(100)
    held = count_exponents(values * 8, FLOAT16, 4.0, held_at=8.0)
    assert torch.equal(held, count_exponents(values, FLOAT16, 4.0))


def test_the_entries_of_a_sparse_tensor_are_counted() -> None:
    places, entries = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 5.0])
    sparse = torch.sparse_coo_tensor(places, entries, (9,), check_invariants=True)
    dense = count_exponents(torch.tensor([3.0, 5.0]), FLOAT16)
    assert torch.equal(count_exponents(sparse, FLOAT16), dense)


@settings(max_examples=100, deadline=None)
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
    assert lost_fraction(count_exponents(values, FLOAT16), scale, half) == float(lost)


def test_the_share_and_amax_of_nothing_and_of_what_is_not_finite() -> None:
    nothing = count_exponents(torch.zeros(3), FLOAT16)
    assert (amax_of(nothing), lost_fraction(nothing, 1.0, torch.float16)) == (0.0, 0.0)
    for bad in (math.inf, -math.inf, math.nan):
        seen = count_exponents(torch.tensor([bad, 1.0]), FLOAT16)
        assert amax_of(seen) == math.inf
        assert int(seen[len(FIELDS) :].sum()) == 1
