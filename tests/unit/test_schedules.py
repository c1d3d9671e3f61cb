"""The shipped schedules over their planned steps."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mpframe.optim.schedules import constant, onecycle, warmup_cosine


def rates(make: object, steps: int, **arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule: LRScheduler = make(optimizer, **arguments)  # type: ignore[operator]
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return seen


def test_constant_stays() -> None:
    assert rates(constant, 20) == [0.5] * 20


def test_warmup_rises_in_equal_steps_and_the_cosine_falls_to_its_floor() -> None:
    seen = rates(warmup_cosine, 100, total_steps=100, warmup=0.1, min_factor=0.01)
    # Ten steps of 1/11 each lead up to the full rate at step 10 (counted from 0).
    assert seen[:11] == pytest.approx([0.5 * (step + 1) / 11 for step in range(11)])
    floor = 0.5 * 0.01
    # PyTorch's recursive form of the cosine accumulates a rounding error a step: 90 of 2^-52.
    cosine = [floor + (0.5 - floor) * (1 + math.cos(math.pi * t / 90)) / 2 for t in range(90)]
    assert seen[10:] == pytest.approx(cosine, rel=1e-9)


@pytest.mark.parametrize("total", [1, 2, 5])
def test_short_runs_have_a_schedule_too(total: int) -> None:
    for make in (warmup_cosine, onecycle):
        seen = rates(make, total, total_steps=total)
        assert all(0.0 <= rate <= 0.5 for rate in seen)


def test_onecycle_peaks_at_the_learning_rate() -> None:
    seen = rates(onecycle, 100, total_steps=100, pct_start=0.3)
    # The peak lies at step 29.3, a third of a step from where a rate is taken.
    assert max(seen) == pytest.approx(0.5, rel=1e-3)
    assert seen.index(max(seen)) in (29, 30)
    assert seen[0] < 0.05
    assert seen[-1] < 0.01


@pytest.mark.parametrize("make", [warmup_cosine, onecycle])
def test_groups_keep_their_ratio(make: object) -> None:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 0.05)]
    optimizer = torch.optim.SGD(groups)
    floor = {"min_factor": 0.2} if make is warmup_cosine else {}
    schedule = make(optimizer, total_steps=20, **floor)  # type: ignore[operator]
    for _ in range(20):
        first, second = (group["lr"] for group in optimizer.param_groups)
        # Each is a few float64 products away from its base rate: far fewer than 100 roundings.
        assert second == pytest.approx(0.1 * first, rel=100 * 2.0**-53)
        optimizer.step()
        schedule.step()
