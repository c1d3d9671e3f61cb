"""Backoff: golden sequences, and equality with the kernels and rules it is the same as."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpframe.core.loss_scaling import Backoff

CLEAN, OVERFLOW = torch.tensor(1.0), torch.tensor(math.inf)
NO_CLAMPS = {"min_scale": 2.0**-126, "max_scale": 2.0**127}
repeatable = settings(max_examples=15, derandomize=True, deadline=None, database=None)


def scales(scaler: Backoff, steps: str) -> list[float]:
    """The scale after each step; `.` is a clean step, `x` an overflow."""
    seen = []
    for step in steps:
        scaler.update(OVERFLOW if step == "x" else CLEAN)
        seen.append(scaler.scale.item())
    return seen


def random_overflows(seed: int, steps: int = 40, streams: int = 20) -> Tensor:
    """(steps, streams) bool, each stream with its own share of overflows."""
    chance = torch.Generator().manual_seed(seed)
    return torch.rand(steps, streams, generator=chance) < torch.rand(streams, generator=chance)


def replay(scaler: Backoff, overflows: Tensor) -> Tensor:
    rows = []
    for overflow in overflows:
        scaler.update(torch.where(overflow, OVERFLOW, CLEAN))
        rows.append(scaler.scale)
    return torch.stack(rows)


def test_the_interval_ends_in_growth_and_an_overflow_halves_and_starts_the_count_anew() -> None:
    scaler = Backoff(init_scale=16.0, growth_interval=3)
    assert scales(scaler, ".......") == [16, 16, 32, 32, 32, 64, 64]
    assert scales(scaler, ".x..." + "xx.") == [64, 32, 32, 32, 64, 32, 16, 16]


def test_nan_is_an_overflow_and_zero_is_not() -> None:
    scaler = Backoff(init_scale=16.0, growth_interval=2)
    scaler.update(torch.tensor(math.nan))
    assert scaler.scale == 8
    scaler.update(torch.tensor(0.0))
    scaler.update(torch.tensor(0.0))
    assert scaler.scale == 16


def test_the_scale_is_clamped_at_both_ends() -> None:
    scaler = Backoff(init_scale=4.0, growth_interval=1, min_scale=3.0, max_scale=10.0)
    assert scales(scaler, "..xxx..") == [8, 10, 5, 3, 3, 6, 10]
    highest = torch.finfo(torch.float32).max
    scaler = Backoff(init_scale=2.0**126, growth_interval=1, max_scale=highest)
    assert scales(scaler, "....") == [2.0**127, highest, highest, highest]


def test_only_growth_refills_the_hysteresis() -> None:
    scaler = Backoff(init_scale=16.0, growth_interval=3, hysteresis=2)
    # The first overflow is forgiven, the second is not, nor a third after two clean steps; after
    # three clean steps the scale grows and the next overflow is forgiven again.
    assert scales(scaler, "xx..x" + "...xx") == [16, 8, 8, 8, 4, 4, 4, 8, 8, 4]


def test_growth_refills_the_hysteresis_at_the_ceiling_too() -> None:
    scaler = Backoff(init_scale=8.0, growth_interval=2, hysteresis=2, max_scale=8.0)
    assert scales(scaler, "x..xx") == [8, 8, 8, 8, 4]


@repeatable
@given(st.integers(0, 2**32 - 1), st.integers(1, 10))
def test_equals_the_kernel_of_grad_scaler(seed: int, interval: int) -> None:
    overflows = random_overflows(seed)
    ours = replay(Backoff(growth_interval=interval, **NO_CLAMPS), overflows)
    for stream in range(overflows.shape[1]):
        scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
        theirs = []
        for found_inf in overflows[:, stream].float().unbind():
            torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, interval)
            theirs.append(scale.clone())
        assert torch.equal(ours[:, stream], torch.stack(theirs))


class Megatron:
    """The rule of Megatron's dynamic scaler, from its equations."""

    def __init__(self, interval: int, hysteresis: int) -> None:
        self.interval, self.hysteresis = interval, hysteresis
        self.scale, self.growth, self.left = 2.0**16, 0, hysteresis

    def update(self, overflow: bool) -> float:
        if overflow:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.left = 0, self.hysteresis
                self.scale *= 2.0
        return self.scale


@repeatable
@given(st.integers(0, 2**32 - 1), st.integers(1, 10), st.integers(1, 5))
def test_hysteresis_equals_megatrons(seed: int, interval: int, hysteresis: int) -> None:
    overflows = random_overflows(seed)
    scaler = Backoff(growth_interval=interval, hysteresis=hysteresis, max_scale=2.0**127)
    ours = replay(scaler, overflows)
    for stream in range(overflows.shape[1]):
        reference = Megatron(interval, hysteresis)
        theirs = [reference.update(bool(overflow)) for overflow in overflows[:, stream].tolist()]
        assert ours[:, stream].tolist() == theirs


def test_more_clean_steps_than_a_shorter_interval_grow_at_once() -> None:
    """A run is resumed with a smaller growth_interval than its count has reached."""
    scaler, resumed = Backoff(2.0**8, growth_interval=100), Backoff(growth_interval=10)
    scales(scaler, "." * 50)
    resumed.load_state_dict(scaler.state_dict())
    assert scales(resumed, "..") == [2.0**9, 2.0**9]
