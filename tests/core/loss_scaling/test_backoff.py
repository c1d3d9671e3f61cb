"""Backoff: golden sequences, and equality with the kernels and rules it is the same as."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpframe.core.loss_scaling import Backoff

AMAX = {".": torch.tensor(1.0), "0": torch.tensor(0.0), "x": torch.tensor(math.inf),
        "n": torch.tensor(math.nan)}  # fmt: skip
NO_CLAMPS = {"min_scale": 2.0**-126, "max_scale": 2.0**127}
LARGEST = torch.finfo(torch.float32).max
repeatable = settings(max_examples=15, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1)


def scales(scaler, steps):
    """The scale after each step, by the signs of `AMAX`."""
    seen = []
    for step in steps:
        scaler.update(AMAX[step])
        seen.append(scaler.scale.item())
    return seen


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # The interval ends in growth; an overflow halves and starts the count anew.
        ((16, 3), "........x...xx.", [16, 16, 32, 32, 32, 64, 64, 64, 32, 32, 32, 64, 32, 16, 16]),
        ((16, 2), "n00", [8, 8, 16]),
        ((4, 1, 1, 3, 10), "..xxx..", [8, 10, 5, 3, 3, 6, 10]),
        ((2**126, 1, 1, 1, LARGEST), "....", [2.0**127, LARGEST, LARGEST, LARGEST]),
        # The first overflow is forgiven, the second is not, nor a third after two clean steps;
        # after three clean steps the scale grows and the next overflow is forgiven again.
        ((16, 3, 2), "xx..x...xx", [16, 8, 8, 8, 4, 4, 4, 8, 8, 4]),
        ((8, 2, 2, 1, 8), "x..xx", [8, 8, 8, 8, 4]),
    ],
    ids=["growth", "nan and 0", "clamped", "largest", "hysteresis", "hysteresis at the ceiling"],
)
def test_sequence(options, steps, expected) -> None:
    names = ("init_scale", "growth_interval", "hysteresis", "min_scale", "max_scale")
    assert scales(Backoff(**dict(zip(names, options, strict=False))), steps) == expected


def test_more_clean_steps_than_a_shorter_interval_grow_at_once() -> None:
    """A run is resumed with a smaller growth_interval than its count has reached."""
    scaler, resumed = Backoff(2.0**8, growth_interval=100), Backoff(growth_interval=10)
    scales(scaler, "." * 50)
    resumed.load_state_dict(scaler.state_dict())
    assert scales(resumed, "..") == [2.0**9, 2.0**9]


def replay(scaler, seed, steps=40, streams=20):
    """Random overflows, (steps, streams), each stream with its own share, and the scales."""
    chance = torch.Generator().manual_seed(seed)
    share = torch.rand(steps, streams, generator=chance) < torch.rand(streams, generator=chance)
    rows = []
    for overflow in share:
        scaler.update(torch.where(overflow, AMAX["x"], AMAX["."]))
        rows.append(scaler.scale)
    return zip(share.unbind(1), torch.stack(rows).unbind(1), strict=True)


@repeatable
@given(seeds, st.integers(1, 10))
def test_equals_the_kernel_of_grad_scaler(seed, interval) -> None:
    for overflows, ours in replay(Backoff(growth_interval=interval, **NO_CLAMPS), seed):
        scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
        theirs = []
        for found_inf in overflows.float().unbind():
            torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, interval)
            theirs.append(scale.clone())
        assert torch.equal(ours, torch.stack(theirs))


def megatron(overflows, interval, hysteresis):
    """The rule of Megatron's dynamic scaler, from its equations."""
    scale, growth, left = 2.0**16, 0, hysteresis
    for overflow in overflows:
        growth, left = (0, left - 1) if overflow else (growth + 1, left)
        if overflow and left <= 0:
            scale = max(scale * 0.5, 1.0)
        elif growth == interval:
            scale, growth, left = scale * 2.0, 0, hysteresis
        yield scale


@repeatable
@given(seeds, st.integers(1, 10), st.integers(1, 5))
def test_hysteresis_equals_megatrons(seed, interval, hysteresis) -> None:
    scaler = Backoff(growth_interval=interval, hysteresis=hysteresis, max_scale=2.0**127)
    for overflows, ours in replay(scaler, seed):
        assert ours.tolist() == [*megatron(overflows.tolist(), interval, hysteresis)]
