"""The shipped schedules over their planned steps, and what a resumed run makes of a longer plan."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from omegaconf import OmegaConf
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from mpframe.config import CONF
from mpframe.core.errors import ConfigError
from mpframe.training.callbacks import schedules
from mpframe.training.callbacks.schedules import PlannedSchedule, onecycle, poly, warmup_cosine

Make, pieces = Callable[..., Any], schedules.piecewise_constant
ROUNDINGS = 100 * 2.0**-53  # A few powers, roots and products in float64: far fewer than that.


def settings(optimizer: Optimizer, schedule: Any, steps: int) -> list[dict[str, Any]]:
    seen = []
    for _ in range(steps):
        seen.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
        optimizer.step()
        schedule.step()
    return seen


def rates(make: Make, steps: int, **arguments: Any) -> list[float]:
    optimizer = SGD([torch.zeros(1)], lr=0.5)
    return [float(own["lr"]) for own in settings(optimizer, make(optimizer, **arguments), steps)]


def test_warmup_rises_in_equal_steps_and_the_cosine_falls_to_its_floor() -> None:
    seen = rates(warmup_cosine, 100, total_steps=100, warmup=0.1, min_factor=0.01)
    # Ten steps of 1/11 each lead up to the full rate at step 10 (counted from 0).
    assert seen[:11] == pytest.approx([0.5 * (step + 1) / 11 for step in range(11)])
    floor = 0.5 * 0.01
    # PyTorch's recursive form of the cosine accumulates a rounding error a step: 90 of 2^-52.
    cosine = [floor + (0.5 - floor) * (1 + math.cos(math.pi * t / 90)) / 2 for t in range(90)]
    assert seen[10:] == pytest.approx(cosine, rel=1e-9)


@pytest.mark.parametrize(("cls", "options"), [
    (SGD, {"base_momentum": 0.7, "max_momentum": 0.9, "div_factor": 9, "final_div_factor": 9}),
    (AdamW, {"pct_start": 0.4, "anneal_strategy": "linear", "three_phase": True}),
    (AdamW, {"cycle_momentum": False}),
])  # fmt: skip
def test_onecycle_takes_all_that_torchs_takes(cls: Any, options: dict[str, Any]) -> None:
    """Rates and momenta; the shipped file says torch's defaults."""
    shipped = OmegaConf.load(CONF / "scheduler" / "onecycle.yaml")
    arguments: Any = {**shipped, **options}
    assert arguments.pop("_target_") == "mpframe.training.callbacks.schedules.onecycle"
    unused = {"optimizer", "max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch"}
    assert set(inspect.signature(OneCycleLR).parameters) - unused == set(arguments)
    mine, torchs = (cls([torch.zeros(1)], lr=0.5) for _ in range(2))
    expected = OneCycleLR(torchs, max_lr=0.5, total_steps=31, **options)
    seen = settings(mine, onecycle(mine, total_steps=30, **arguments), 30)
    assert seen == settings(torchs, expected, 30)
    momenta = {own.get("momentum", own.get("betas")) for own in seen}
    assert (len(momenta) > 1) == options.get("cycle_momentum", True)


@pytest.mark.parametrize("make", [warmup_cosine, onecycle, poly])
def test_groups_keep_their_ratio_and_short_runs_have_a_schedule_too(make: Make) -> None:
    for total in (1, 2, 5):
        assert all(0.0 <= rate <= 0.5 for rate in rates(make, total, total_steps=total))
    optimizer = SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 0.05)])
    floor = {} if make is onecycle else {"min_factor": 0.2}
    schedule = make(optimizer, total_steps=20, **floor)
    for _ in range(20):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(0.1 * first, rel=ROUNDINGS)
        optimizer.step()
        schedule.step()


def poly_by_hand(t: int, begin: int = 10) -> float:
    return (t + 1) / 11 if t < 10 else 0.1 + 0.9 * min(1.0, (50 - t) / (50 - begin)) ** 2


def noam_by_hand(t: int) -> float:
    return 3 * 16**-0.5 * min((t + 1) ** -0.5, (t + 1) * 8**-1.5)


POLY = {"total_steps": 50, "power": 2.0, "warmup": 0.2, "min_factor": 0.1}
STAIRS = {"factor": 0.5, "every": 2, "begin": 1, "staircase": True, "min_factor": 0.2, "unit": 5}
PARTS = {"factor": 0.5, "every": 0.07, "staircase": True, "unit": 100}
NOAM = {"d_model": 16, "warmup_steps": 8, "coefficient": 3.0}
PIECES = {"boundaries": [2, 3.5], "factors": [0.1, 3.0], "unit": 10}


@pytest.mark.parametrize(("make", "arguments", "by_hand"), [
    (schedules.constant, {}, lambda t: 1.0),
    (poly, POLY, poly_by_hand),
    (poly, {**POLY, "begin": 0.4}, lambda t: poly_by_hand(t, begin=20)),
    (poly, {**POLY, "begin": 0.1}, poly_by_hand),  # before the warm-up ends
    (poly, {"total_steps": 40}, lambda t: max(0.0, 1 - t / 40)),  # beyond its end
    (schedules.exponential, {"factor": 0.9, "every": 0.5, "unit": 20}, lambda t: 0.9 ** (t / 10)),
    (schedules.exponential, {"factor": 0.5, "begin": 7}, lambda t: 0.5 ** max(0, t - 7)),
    (schedules.exponential, STAIRS, lambda t: max(0.2, 0.5 ** (max(0, t - 5) // 10))),
    (schedules.exponential, PARTS, lambda t: 0.5 ** (t // 7)),
    (schedules.transformer, NOAM, noam_by_hand),
    (schedules.transformer, {**NOAM, "max_factor": 0.2}, lambda t: min(0.2, noam_by_hand(t))),
    (pieces, PIECES, lambda t: 1.0 if t < 20 else 0.1 if t < 35 else 3.0),
])  # fmt: skip
def test_each_is_its_formula_at_every_step(make: Make, arguments: Any, by_hand: Any) -> None:
    wanted = [pytest.approx(0.5 * by_hand(t), rel=ROUNDINGS, abs=0) for t in range(50)]
    assert rates(make, 50, **arguments) == wanted


@pytest.mark.parametrize(("make", "arguments", "line"), [
    (poly, {"total_steps": 5, "power": 0.0}, "power=0.0: must be a number > 0"),
    (poly, {"total_steps": 5, "warmup": 2.0}, "warmup=2.0: must be a fraction >= 0 and <= 1"),
    (schedules.exponential, {"factor": 1.5}, "factor=1.5: must be a number > 0 and <= 1"),
    (schedules.exponential, {"factor": 1.0, "begin": -1.0}, "begin=-1.0: must be a number >= 0"),
    (schedules.transformer, {"d_model": 0, "warmup_steps": 4}, "d_model=0: must be a number >= 1"),
    (schedules.transformer, {**NOAM, "max_factor": 0.0}, "max_factor=0.0: must be a number > 0"),
    (pieces, {"boundaries": [1], "factors": []}, "factors: 0 for 1 boundaries; give one for each"),
    (pieces, {"boundaries": [2, 1], "factors": [1, 1]}, "boundaries=[2, 1]: must rise"),
])  # fmt: skip
def test_what_a_schedule_does_not_take_is_one_line(make: Make, arguments: Any, line: str) -> None:
    assert refused(ConfigError, rates, make, 1, **arguments) == f"scheduler.{line}"


class LikeTimm:
    """Is told of updates and of epochs, as timm's schedules are."""

    def __init__(self, optimizer: Optimizer, total_steps: int = 1) -> None:
        self.told: list[tuple[str, int]] = []
        self._optimizer, self._total = optimizer, total_steps

    def step_update(self, updates: int) -> None:
        self.told.append(("update", updates))
        self._optimizer.param_groups[0]["lr"] = updates / self._total

    def step(self, epochs: int) -> None:
        self.told.append(("epoch", epochs))

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_schedule_like_timms_is_told_of_updates_and_whole_epochs() -> None:
    optimizer = SGD([torch.zeros(1)], lr=0.5)
    each = {"steps_per_epoch": 2}
    planned = PlannedSchedule(lambda _: (LikeTimm(optimizer), {}), optimizer, lambda _: each)
    for _ in range(5):
        planned.step()
    one, two, three, four, five = (("update", number) for number in range(1, 6))
    assert planned.schedule.told == [one, two, ("epoch", 1), three, four, ("epoch", 2), five]


def planned(make: Make, total: int, lr: float = 0.1) -> tuple[Optimizer, PlannedSchedule]:
    optimizer = SGD([torch.zeros(1)], lr=lr, momentum=0.9)
    numbers = {"steps_per_epoch": 11}

    def made(_: object) -> tuple[Any, dict[str, str]]:
        return make(optimizer, total), {"total_steps": str(total)}

    return optimizer, PlannedSchedule(made, optimizer, lambda _: numbers)


def resumed(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    for own, saved in zip(other, one, strict=True):
        own.load_state_dict(saved.state_dict())
    return other


LENGTHS: dict[str, Make] = {
    "warmup_cosine": warmup_cosine,
    "poly": partial(poly, power=2.0),
    "CosineAnnealingLR": CosineAnnealingLR,
    "OneCycleLR, momenta": lambda own, total: OneCycleLR(own, max_lr=0.1, total_steps=total + 1),
    "like timm's": LikeTimm,
}


@pytest.mark.parametrize(("name", "done"), [*((n, 9) for n in LENGTHS), ("warmup_cosine", 22)])
def test_a_longer_plan_has_its_own_schedule_from_now_on(name: str, done: int, caplog: Log) -> None:
    make = LENGTHS[name]
    wanted, first = settings(*planned(make, 44), 44), planned(make, 22)
    assert settings(*first, done) != wanted[:done]
    longer = resumed(first, planned(make, 44, lr=0.7))  # The saved rate counts.
    assert settings(*longer, 44 - done) == wanted[done:]
    assert caplog.messages == [
        f"warning: scheduler.total_steps=44 (was 22): from step {done} on the learning rate "
        "follows this schedule"
    ]


def test_a_schedule_that_was_made_longer_is_saved_as_such(caplog: Log) -> None:
    first = planned(onecycle, 22)
    settings(*first, 9)
    second = resumed(first, planned(onecycle, 44, lr=0.7))
    settings(*second, 9)
    third = resumed(second, planned(onecycle, 44))
    assert settings(*third, 26) == settings(*second, 26)
    assert third[1].state_dict()["updates"] == second[1].state_dict()["updates"] == 44
    assert len(caplog.messages) == 1  # of the first resume
