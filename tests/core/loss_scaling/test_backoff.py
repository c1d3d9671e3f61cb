"""Backoff: golden sequences, and equality with the kernels and rules it is the same as."""

import math
import random

import pytest
import torch

from mpframe.core.loss_scaling import Backoff

AMAX = {".": 1.0, "0": 0.0, "x": math.inf, "n": math.nan}
LARGEST = torch.finfo(torch.float32).max


def scales(scaler, steps):
    """The scale after each step, by the signs of `AMAX`."""
    return [scaler.update(torch.tensor(AMAX[step])) or scaler.scale.item() for step in steps]


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # The interval ends in growth; an overflow halves and starts the count anew.
        ((16, 3), "........x...xx.", [16, 16, 32, 32, 32, 64, 64, 64, 32, 32, 32, 64, 32, 16, 16]),
        ((16, 2), "n00", [8, 8, 16]),
        ((4, 1, 1, 3, 10), "..xxx..", [8, 10, 5, 3, 3, 6, 10]),
        ((2**126, 1, 1, 1, LARGEST), "...", [2.0**127] * 3),
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


def grad_scaler(overflows, interval, _):
    """The kernel of `torch.amp.GradScaler`."""
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        found_inf = torch.tensor(float(overflow))
        yield torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, interval).item()


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


@pytest.mark.parametrize(("rule", "floor", "most"), [(grad_scaler, 2.0**-126, 1), (megatron, 1, 5)])
def test_equals_the_rules_of_others(rule, floor, most) -> None:
    """Over 200 streams, each with its own share of overflows."""
    chance = random.Random(0)
    for _ in range(200):
        share, interval, hysteresis = (
            chance.random(),
            chance.randint(1, 10),
            chance.randint(1, most),
        )
        overflows = [chance.random() < share for _ in range(40)]
        scaler = Backoff(2**16, 2, 0.5, interval, hysteresis, min_scale=floor, max_scale=2.0**127)
        ours = scales(scaler, ["x" if overflow else "." for overflow in overflows])
        assert ours == [*rule(overflows, interval, hysteresis)]


def test_a_state_is_continued_with_wider_counts_or_more_than_a_shorter_interval() -> None:
    """Counts were saved as int64 once. Those beyond a new interval grow the scale at once."""
    for interval, steps, expected in ((4, ".x..", [16, 8, 8, 8]), (2, "..x", [32, 32, 32])):
        saved = Backoff(16, growth_interval=9, hysteresis=2)
        scales(saved, "x..")
        wide = {n: v.long() if n.endswith("s") else v for n, v in saved.state_dict().items()}
        resumed = Backoff(growth_interval=interval, hysteresis=2)
        resumed.load_state_dict(wide)
        assert scales(resumed, steps) == expected
