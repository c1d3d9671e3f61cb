"""The shipped schedules over their planned steps."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
)

from mpframe.config.locations import CONF
from mpframe.core.errors import ConfigError
from mpframe.training.callbacks.schedules import (
    PlannedSchedule,
    constant,
    exponential,
    onecycle,
    piecewise_constant,
    poly,
    transformer,
    warmup_cosine,
)


def rates(make: object, steps: int, **arguments: object) -> list[float]:
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


ONECYCLE: list[dict[str, Any]] = [
    {},
    {"pct_start": 0.4, "anneal_strategy": "linear", "three_phase": True},
    {"base_momentum": 0.7, "max_momentum": 0.9, "div_factor": 10.0, "final_div_factor": 100.0},
    {"cycle_momentum": False},
]


@pytest.mark.parametrize("options", ONECYCLE)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_onecycle_takes_all_that_torchs_takes(cls: Any, options: dict[str, Any]) -> None:
    """Rates and momenta; the shipped file says torch's defaults."""
    shipped = OmegaConf.load(CONF / "scheduler" / "onecycle.yaml")
    arguments: Any = {**shipped, **options}
    assert arguments.pop("_target_") == "mpframe.training.callbacks.schedules.onecycle"
    taken = set(inspect.signature(OneCycleLR).parameters)
    unused = {"optimizer", "max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch"}
    assert taken - unused == set(arguments)
    mine, torchs = (cls([torch.zeros(1)], lr=0.5) for _ in range(2))
    schedules = (
        onecycle(mine, total_steps=30, **arguments),
        OneCycleLR(torchs, max_lr=0.5, total_steps=31, **options),
    )
    momenta = set()
    for _ in range(30):
        first, second = ({**own.param_groups[0], "params": None} for own in (mine, torchs))
        assert first == second
        momenta.add(first.get("momentum", first.get("betas")))
        for optimizer, schedule in zip((mine, torchs), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert (len(momenta) > 1) == options.get("cycle_momentum", True)


@pytest.mark.parametrize("make", [warmup_cosine, onecycle, poly])
def test_groups_keep_their_ratio(make: object) -> None:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.5, 0.05)]
    optimizer = torch.optim.SGD(groups)
    floor = {"min_factor": 0.2} if make is not onecycle else {}
    schedule = make(optimizer, total_steps=20, **floor)  # type: ignore[operator]
    for _ in range(20):
        first, second = (group["lr"] for group in optimizer.param_groups)
        # Each is a few float64 products away from its base rate: far fewer than 100 roundings.
        assert second == pytest.approx(0.1 * first, rel=100 * 2.0**-53)
        optimizer.step()
        schedule.step()


def poly_by_hand(t: int) -> float:
    if t < 10:
        return (t + 1) / 11
    return 0.1 + 0.9 * ((50 - t) / 40) ** 2


def staircase_by_hand(t: int) -> float:
    """Half after each 10 steps from step 5 on, and never below a fifth."""
    falls = 0 if t < 5 else (t - 5) // 10
    return max(0.2, 1 / 2**falls)


def noam_by_hand(t: int) -> float:
    return 3 * 16**-0.5 * min((t + 1) ** -0.5, (t + 1) * 8**-1.5)


FORMULAS: dict[str, tuple[Any, dict[str, Any], Callable[[int], float]]] = {
    "poly": (
        poly,
        {"total_steps": 50, "power": 2.0, "warmup": 0.2, "min_factor": 0.1},
        poly_by_hand,
    ),
    "poly, late": (
        poly,
        {"total_steps": 50, "power": 2.0, "warmup": 0.2, "begin": 0.4, "min_factor": 0.1},
        lambda t: (t + 1) / 11 if t < 10 else 1.0 if t < 20 else 0.1 + 0.9 * ((50 - t) / 30) ** 2,
    ),
    "poly, begins before the warm-up ends": (
        poly,
        {"total_steps": 50, "power": 2.0, "warmup": 0.2, "begin": 0.1, "min_factor": 0.1},
        poly_by_hand,
    ),
    "poly, a line": (poly, {"total_steps": 50}, lambda t: 1 - t / 50),
    "exponential": (
        exponential,
        {"factor": 0.9, "every": 0.5, "unit": 20},
        lambda t: 0.9 ** (t / 10),
    ),
    "exponential, late": (exponential, {"factor": 0.5, "begin": 7}, lambda t: 0.5 ** max(0, t - 7)),
    "exponential, staircase": (
        exponential,
        {"factor": 0.5, "every": 2, "begin": 1, "staircase": True, "min_factor": 0.2, "unit": 5},
        staircase_by_hand,
    ),
    "exponential, parts of the run": (
        exponential,
        {"factor": 0.5, "every": 0.07, "staircase": True, "unit": 100},
        lambda t: 0.5 ** (t // 7),
    ),
    "transformer": (
        transformer,
        {"d_model": 16, "warmup_steps": 8, "coefficient": 3.0},
        noam_by_hand,
    ),
    "transformer, bounded": (
        transformer,
        {"d_model": 16, "warmup_steps": 8, "coefficient": 3.0, "max_factor": 0.2},
        lambda t: min(0.2, noam_by_hand(t)),
    ),
    "piecewise_constant": (
        piecewise_constant,
        {"boundaries": [2, 3.5], "factors": [0.1, 3.0], "unit": 10},
        lambda t: 1.0 if t < 20 else 0.1 if t < 35 else 3.0,
    ),
    "piecewise_constant, parts of the run": (
        piecewise_constant,
        {"boundaries": [0.07], "factors": [0.5], "unit": 100},
        lambda t: 1.0 if t < 7 else 0.5,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_each_is_its_formula_at_every_step(name: str) -> None:
    make, arguments, by_hand = FORMULAS[name]
    # Powers, roots and products in float64, in another order: far fewer than 100 roundings.
    wanted = [pytest.approx(0.5 * by_hand(t), rel=100 * 2.0**-53, abs=0) for t in range(50)]
    assert rates(make, 50, **arguments) == wanted


@pytest.mark.parametrize(
    ("make", "arguments", "torchs", "its_arguments"),
    [
        (poly, {"total_steps": 30, "power": 1.5}, PolynomialLR, {"total_iters": 30, "power": 1.5}),
        (exponential, {"factor": 0.9}, ExponentialLR, {"gamma": 0.9}),
        (
            piecewise_constant,
            {"boundaries": [3, 8], "factors": [0.1, 0.01]},
            MultiStepLR,
            {"milestones": [3, 8], "gamma": 0.1},
        ),
    ],
)
def test_each_is_that_of_torch_where_torch_has_it(
    make: Any, arguments: dict[str, Any], torchs: Any, its_arguments: dict[str, Any]
) -> None:
    # torch multiplies the last rate at each step: a few roundings for each.
    assert rates(make, 40, **arguments) == pytest.approx(
        rates(torchs, 40, **its_arguments), rel=400 * 2.0**-53, abs=1e-300
    )


def test_after_the_planned_end_poly_stays_at_its_last_rate() -> None:
    seen = rates(poly, 20, total_steps=10, min_factor=0.2)
    assert seen[10:] == [0.5 * 0.2] * 10


@pytest.mark.parametrize(
    ("make", "arguments", "line"),
    [
        (poly, {"total_steps": 5, "power": 0.0}, "scheduler.power=0.0: must be a number > 0"),
        (
            poly,
            {"total_steps": 5, "warmup": 2.0},
            "scheduler.warmup=2.0: must be a fraction >= 0 and <= 1",
        ),
        (exponential, {"factor": 1.5}, "scheduler.factor=1.5: must be a number > 0 and <= 1"),
        (exponential, {"factor": 0.5, "every": 0.0}, "scheduler.every=0.0: must be a number > 0"),
        (
            exponential,
            {"factor": 0.5, "begin": -1.0},
            "scheduler.begin=-1.0: must be a number >= 0",
        ),
        (exponential, {"factor": 0.5, "unit": 0}, "scheduler.unit=0: must be a number >= 1"),
        (
            transformer,
            {"d_model": 0, "warmup_steps": 4},
            "scheduler.d_model=0: must be a number >= 1",
        ),
        (
            transformer,
            {"d_model": 4, "warmup_steps": 4, "max_factor": 0.0},
            "scheduler.max_factor=0.0: must be a number > 0",
        ),
        (
            piecewise_constant,
            {"boundaries": [1], "factors": []},
            "scheduler.factors: 0 for 1 boundaries; give one for each",
        ),
        (
            piecewise_constant,
            {"boundaries": [2, 1], "factors": [1, 1]},
            "scheduler.boundaries=[2, 1]: must rise",
        ),
        (
            piecewise_constant,
            {"boundaries": [1], "factors": [math.inf]},
            "scheduler.factors=inf: must be a number >= 0",
        ),
    ],
)
def test_what_a_schedule_does_not_take_is_one_line(
    make: Any, arguments: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        rates(make, 1, **arguments)
    assert str(refused.value) == line


class LikeTimm:
    """Is told of updates and of epochs, as timm's schedules are."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def step_update(self, updates: int) -> None:
        self.told.append(("update", updates))

    def step(self, epochs: int) -> None:
        self.told.append(("epoch", epochs))

    def state_dict(self) -> dict[str, Any]:
        return {}


def planned(optimizer: torch.optim.Optimizer, **arguments: str) -> PlannedSchedule:
    return PlannedSchedule(LikeTimm, optimizer, arguments, steps_per_epoch=2)


def test_a_schedule_like_timms_is_told_of_updates_and_whole_epochs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    first, longer = planned(optimizer), planned(optimizer, total_steps="9")
    for _ in range(5):
        first.step()
    updates = [("update", number) for number in range(1, 6)]
    told = [*updates[:2], ("epoch", 1), *updates[2:4], ("epoch", 2), updates[4]]
    assert first.schedule.told == told
    longer.load_state_dict(first.state_dict())
    assert longer.schedule.told == told
