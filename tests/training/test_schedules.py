"""Schedules: their formulas, a resumed run's longer plan, and what a run does with one."""

import inspect
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, refused
from in_process import assert_same_run, composed, cut, scalars, train, trained
from omegaconf import OmegaConf
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, OneCycleLR

from mpframe import checkpoint
from mpframe.config import CONF
from mpframe.config.command_line import check_config
from mpframe.config.planned import fill_in
from mpframe.core.errors import ConfigError
from mpframe.data.metrics import Accuracy
from mpframe.run.optimizer import build_schedule
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
    own = PlannedSchedule(lambda _: (LikeTimm(optimizer), {}), optimizer, lambda _: each)
    for _ in range(5):
        own.step()
    one, two, three, four, five = (("update", number) for number in range(1, 6))
    assert own.schedule.told == [one, two, ("epoch", 1), three, four, ("epoch", 2), five]


def planned(make: Make, total: int, lr: float = 0.1) -> tuple[Optimizer, PlannedSchedule]:
    own = SGD([torch.zeros(1)], lr=lr, momentum=0.9)
    names, each = {"total_steps": str(total)}, {"steps_per_epoch": 11}
    return own, PlannedSchedule(lambda _: (make(own, total), names), own, lambda _: each)


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


SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "optimizer=sgd", "trainer.log_every=1"]
TORCH = "torch.optim.lr_scheduler"
PLATEAU = [f"scheduler._target_={TORCH}.ReduceLROnPlateau", "scheduler.patience=0"]
PLATEAU += ["scheduler.factor=0.5", "scheduler.threshold=0.9"]
PLATEAU_RUN = [*SMALL, *PLATEAU, "trainer.eval_every=2", "trainer.max_steps=16"]
PLATEAU_RUN += ["trainer.checkpoint_every=4", "trainer.keep_last=100"]
plateau = trained(*PLATEAU_RUN)


def test_plateau_follows_the_validations_and_resumes(plateau: Path, tmp_path: Path) -> None:
    """Where the accuracy has not grown by nine tenths since the best, the rate is halved."""
    state, curves = checkpoint.load(plateau)["trainer"]["schedule"][""], scalars(plateau)
    accuracies = [value for _, value in curves["metric/accuracy/val"]]
    rates = [rate for _, rate in curves["optim/lr"]]
    best, rate, expected = 0.0, rates[0], []
    for step in range(16):
        expected.append(rate)
        if step % 2 == 1:
            better = accuracies[step // 2] > best * 1.9
            best, rate = (accuracies[step // 2], rate) if better else (best, rate / 2)
    float32 = 2.0**-23  # of the event files
    assert rates == pytest.approx(expected, rel=float32)
    assert len(set(expected)) > 2
    assert state["best"] == pytest.approx(best, rel=float32)
    assert (state["mode"], state["last_epoch"]) == ("max", 8)
    again = cut(plateau, tmp_path / "resumed", 8)
    train(again, *PLATEAU_RUN, "resume=auto")
    assert_same_run(plateau, again)


def test_with_other_batches_a_resumed_schedule_ends_with_the_run(tmp_path: Path) -> None:
    """22 steps of an epoch, then 11: the 1cycle schedule has 33, and falls to its end with them."""
    words = [*SMALL, "scheduler=onecycle", "trainer.epochs=2", "trainer.checkpoint_every=22"]
    train(tmp_path, *words, "trainer.max_steps=22")
    rates = checkpoint.load(tmp_path)["trainer"]["schedule"][""]["rates"]
    for max_steps in (27, "null"):  # The second time the batches stay the same.
        other = "resume=auto", "dataset.batch_size=128", f"trainer.max_steps={max_steps}"
        train(tmp_path, *words, *other)
    optimizer = SGD([torch.zeros(1)], lr=rates[0])
    schedule, wanted = OneCycleLR(optimizer, rates, 33 + 1), []
    for _ in range(33):
        optimizer.step()
        schedule.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    seen = [rate for _, rate in scalars(tmp_path)["optim/lr"]]
    assert seen[27:] == pytest.approx(wanted[27:], rel=2.0**-23)  # of the event files
    assert (len(seen), seen[-1] < 1e-4 * rates[0]) == (33, True)


def test_another_pace_of_validations_is_said(plateau: Path, tmp_path: Path, caplog: Log) -> None:
    run = Path(shutil.copytree(plateau, tmp_path / "run"))
    train(run, *PLATEAU_RUN, "trainer.eval_every=3", "resume=auto")
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    assert "trainer.eval_every=3 (was 2)" in line


PLAN = {"total_steps": 22, "epochs": 2, "steps_per_epoch": 11}


def test_numbers_are_filled_in() -> None:
    written = ["${plan:total_steps,0.1}", "${plan:epochs}", {"each": ["${plan:steps_per_epoch}"]}]
    expected = [2, 2, {"each": [11]}, 3, "of ${plan:epochs}"]
    assert fill_in([*written, 3, "of ${plan:epochs}"], PLAN) == expected
    shares = {"0.29": 29, "0.07": 7, "0.299": 29, "1e-02": 1, "1": 100}  # 0.29 * 100 is 28.999...
    words = [f"${{plan:total_steps,{share}}}" for share in shares]
    assert fill_in(words, {"total_steps": 100}) == list(shares.values())


def built(*words: str, optimizer: Optimizer | None = None) -> Any:
    own = optimizer or SGD([torch.zeros(1)], lr=0.1)
    config = check_config(composed(*words))
    return build_schedule(config, own, lambda _: PLAN, {"accuracy": Accuracy})


def by_hand(make: Any) -> list[float]:
    """The rate after each of 22 steps of a loop by hand, 11 steps to an epoch."""
    optimizer = SGD([torch.zeros(1)], lr=0.1)
    schedule, seen = make(optimizer), []
    for step in range(1, 23):
        optimizer.step()
        if not hasattr(schedule, "step_update"):
            schedule.step()
        elif schedule.step_update(step) is None and step % 11 == 0:
            schedule.step(step // 11)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize(("make", "words"), [
    (lambda own: schedules.exponential(own, 0.9, begin=0.5, unit=11), "scheduler=exponential scheduler.begin=0.5"),
    (lambda own: schedules.transformer(own, d_model=4, warmup_steps=2), "scheduler=transformer scheduler.d_model=4"),
    (lambda own: schedules.piecewise_constant(own, [0.5, 1], [0.1, 0.01], unit=11), "scheduler=piecewise_constant scheduler.boundaries=[0.5,1]"),
    (lambda own: OneCycleLR(own, max_lr=0.1, total_steps=22), f"scheduler._target_={TORCH}.OneCycleLR scheduler.max_lr=0.1"),
    (lambda own: pytest.importorskip("transformers").get_cosine_schedule_with_warmup(own, 2, 22), "scheduler._target_=transformers.get_cosine_schedule_with_warmup scheduler.num_warmup_steps=${plan:total_steps,0.1} scheduler.num_training_steps=${plan:total_steps}"),
    (lambda own: pytest.importorskip("timm.scheduler").StepLRScheduler(own, decay_t=1, decay_rate=0.5), "scheduler._target_=timm.scheduler.StepLRScheduler scheduler.decay_t=1 scheduler.decay_rate=0.5"),
])  # fmt: skip
def test_a_chosen_schedule_gets_the_numbers_of_the_plan_and_resumes(make: Any, words: str) -> None:
    wanted = by_hand(make)
    assert len(set(wanted)) > 1
    optimizer, other = (SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    schedule, again = (built(*words.split(), optimizer=own) for own in (optimizer, other))
    seen = []
    for step in range(22):
        if step == 9:
            other.load_state_dict(optimizer.state_dict())
            again.load_state_dict(schedule.state_dict())
            optimizer, schedule = other, again
        optimizer.step()
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == wanted


def watched(optimizer: Optimizer, key: str) -> object:
    return ConstantLR(optimizer)


def test_no_secret_of_a_schedules_arguments_is_saved(monkeypatch: Patch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    words = ["scheduler._target_=test_schedules.watched", "scheduler.key=correct-horse-battery"]
    assert "correct-horse" not in str(built(*words).state_dict())


COSINE = f"scheduler._target_={TORCH}.CosineAnnealingLR"
UNFIT = "scheduler.T_max: ValueError raised while resolving interpolation: {}; set scheduler.T_max=VALUE"


@pytest.mark.parametrize(("words", "line"), [
    (["scheduler._target_=builtins.bool"], "scheduler._target_=builtins.bool: has no step and no state_dict and no load_state_dict; see docs/optimizer.md"),
    ([*PLATEAU, "scheduler.mode=min"], "scheduler.mode=min: the schedule watches val_accuracy, where more is better; use scheduler.mode=max"),
    ([f"scheduler._target_={TORCH}.OneCycleLR", "scheduler.max_lr=0.1", "scheduler.total_steps=21"], "scheduler.total_steps=21: OneCycleLR cannot go on after it, and the run is planned for 22 steps; leave it out, or set trainer.epochs or trainer.max_steps to fit it"),
    ([COSINE, "scheduler.T_max=${plan:total_step}"], UNFIT.format("the plan has no total_step: choose total_steps, epochs, steps_per_epoch")),
    ([COSINE, "scheduler.T_max=${plan:total_steps,2}"], UNFIT.format("a share of the plan is a number from 0 to 1, not 2")),
    ([COSINE, "scheduler.T_max=${plan:total_steps,x}"], UNFIT.format("a share of the plan is a number from 0 to 1, not x")),
], ids=["stepless", "worse", "outrun", "unknown", "above one", "no number"])  # fmt: skip
def test_a_schedule_that_a_run_cannot_follow_is_refused(words: list[str], line: str) -> None:
    assert refused(ConfigError, built, *words) == line
