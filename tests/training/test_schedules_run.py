"""Schedules in a run: chosen by options, sized to the plan, stepped, resumed and refused."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun, scalars, train
from sameness import assert_same_run, cut

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.planned import fill_in
from mpframe.config.schema import Config
from mpframe.core.errors import ConfigError
from mpframe.data.metrics import Accuracy
from mpframe.run.optimizer import build_schedule
from mpframe.training.callbacks import schedules

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "optimizer=sgd", "trainer.log_every=1"]
TORCH = "torch.optim.lr_scheduler"
PLATEAU = [
    f"scheduler._target_={TORCH}.ReduceLROnPlateau", "scheduler.patience=0",
    "scheduler.factor=0.5", "scheduler.threshold=0.9",
]  # fmt: skip
PLATEAU_RUN = [
    *SMALL, *PLATEAU, "trainer.eval_every=2", "trainer.max_steps=16", "trainer.checkpoint_every=4",
    "trainer.keep_last=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def plateau(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plateau")
    train(folder, *PLATEAU_RUN)
    return folder


def test_plateau_follows_the_validations(plateau: Path) -> None:
    """Where the accuracy has not grown by nine tenths since the best, the rate is halved."""
    state = checkpoint.load(plateau)["trainer"]["schedule"][""]
    curves = scalars(plateau)
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


def test_plateau_resumes_bit_for_bit(plateau: Path, start_run: StartRun, tmp_path: Path) -> None:
    resumed = cut(plateau, tmp_path / "resumed", 8)
    start_run(resumed, *PLATEAU_RUN, "resume=auto")
    assert_same_run(plateau, resumed)


def test_another_pace_of_validation_is_said_to_change_such_a_run(
    plateau: Path, start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(plateau, tmp_path / "run"))
    start_run(run, *PLATEAU_RUN, "trainer.eval_every=3", "resume=auto")
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    assert "trainer.eval_every=3 (was 2)" in line


def test_a_longer_run_says_what_its_schedule_does(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of the cosine's end, where its rate is 0. Each step takes two batches."""
    options = [*SMALL, "trainer.accumulate=2"]
    start_run(tmp_path, *options, "trainer.epochs=1")
    assert [rate for _, rate in scalars(tmp_path)["optim/lr"]][-1] < 1e-9
    start_run(tmp_path, *options, "trainer.epochs=2", "resume=auto")
    wanted = by_hand(lambda optimizer: schedules.warmup_cosine(optimizer, 22), 22)
    rates = [rate for _, rate in scalars(tmp_path)["optim/lr"]]
    assert rates[11:] == pytest.approx(wanted[11:], rel=1e-6)
    (line,) = (line for line in caplog.messages if "learning rate follows" in line)
    assert line == (
        "warning: scheduler.total_steps=22 (was 11): from step 11 on the learning rate follows this "
        "schedule"
    )


# Sized to the plan

PLAN = {"total_steps": 22, "epochs": 2, "steps_per_epoch": 11}


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("${plan:total_steps,0.1}", 2),
        ("${plan:epochs}", 2),
        ({"each": ["${plan:steps_per_epoch}", 3], "word": "cos"}, {"each": [11, 3], "word": "cos"}),
        ("of ${plan:epochs}", "of ${plan:epochs}"),
    ],
)
def test_numbers_are_filled_in(written: object, filled: object) -> None:
    assert fill_in(written, PLAN) == filled


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("${plan:total_step}", "the plan has no total_step: nearest: total_steps"),
        ("${plan:total_steps,2}", "a share of the plan is a number from 0 to 1, not 2"),
        ("${plan:total_steps,x}", "a share of the plan is a number from 0 to 1, not x"),
    ],
)
def test_a_number_that_the_plan_does_not_have_is_refused_at_once(value: str, line: str) -> None:
    words = [f"scheduler._target_={TORCH}.CosineAnnealingLR", f"scheduler.T_max={value}"]
    with pytest.raises(ConfigError) as refused:
        config_of(*words)
    assert line in str(refused.value)
    assert str(refused.value).startswith("scheduler.T_max: ")
    assert "\n" not in str(refused.value)


@cache
def config_of(*words: str) -> Config:
    return check_config(without_hydra(compose_named(list(words))[1]))


def built(*words: str, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """The schedule as a run makes it."""
    own = optimizer or torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return build_schedule(config_of(*words), own, PLAN, {"accuracy": Accuracy})


def by_hand(make: Any, steps: int, lr: float = 0.1) -> list[float]:
    """The rate after each step of a loop by hand, 11 steps to an epoch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedule, seen = make(optimizer), []
    for step in range(steps):
        optimizer.step()
        if hasattr(schedule, "step_update"):
            schedule.step_update(step + 1)
            if (step + 1) % 11 == 0:
                schedule.step((step + 1) // 11)
        else:
            schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def hugging_face(optimizer: torch.optim.Optimizer) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=22
    )


def timm_by_epochs(optimizer: torch.optim.Optimizer) -> object:
    scheduler = pytest.importorskip("timm.scheduler")
    return scheduler.StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5)


def torchs_onecycle(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=22)


CHOICES: dict[str, tuple[Any, str]] = {
    "exponential": (
        lambda own: schedules.exponential(own, 0.9, begin=0.5, unit=11),
        "scheduler=exponential scheduler.begin=0.5",
    ),
    "transformer": (
        lambda own: schedules.transformer(own, d_model=4, warmup_steps=2),
        "scheduler=transformer scheduler.d_model=4",
    ),
    "piecewise": (
        lambda own: schedules.piecewise_constant(own, [0.5, 1], [0.1, 0.01], unit=11),
        "scheduler=piecewise_constant scheduler.boundaries=[0.5,1]",
    ),
    "torch": (torchs_onecycle, f"scheduler._target_={TORCH}.OneCycleLR scheduler.max_lr=0.1"),
    "hugging face": (
        hugging_face,
        "scheduler._target_=transformers.get_cosine_schedule_with_warmup "
        "scheduler.num_warmup_steps=${plan:total_steps,0.1} "
        "scheduler.num_training_steps=${plan:total_steps}",
    ),
    "timm, epochs": (
        timm_by_epochs,
        "scheduler._target_=timm.scheduler.StepLRScheduler scheduler.decay_t=1 "
        "scheduler.decay_rate=0.5",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_chosen_schedule_gets_the_numbers_of_the_plan_and_resumes(name: str) -> None:
    make, words = CHOICES[name]
    wanted = by_hand(make, 22)
    assert len(set(wanted)) > 1
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2)]
    first, second = (built(*words.split(), optimizer=own) for own in optimizers)
    seen = []
    for step in range(22):
        if step == 9:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
            second.load_state_dict(first.state_dict())
            optimizers[0], first = optimizers[1], second
        optimizers[0].step()
        first.step()
        seen.append(optimizers[0].param_groups[0]["lr"])
    assert seen == wanted


class Watched(torch.optim.lr_scheduler.ConstantLR):
    """Takes what should not be stored."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: str) -> None:
        super().__init__(optimizer)


def test_no_secret_of_a_schedules_arguments_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    words = ["scheduler._target_=test_schedules_run.Watched", "scheduler.key=correct-horse-battery"]
    assert "correct-horse" not in str(built(*words).state_dict())


class Stepless:
    """Lacks what a run calls."""

    def __init__(self, optimizer: object) -> None: ...


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["scheduler._target_=test_schedules_run.Stepless"],
         "scheduler._target_=test_schedules_run.Stepless: has no step and no state_dict and no "
         "load_state_dict; see docs/optimizer.md"),
        ([*PLATEAU, "scheduler.mode=min"],
         "scheduler.mode=min: the schedule watches val_accuracy, where more is better; use "
         "scheduler.mode=max"),
        ([f"scheduler._target_={TORCH}.OneCycleLR", "scheduler.max_lr=0.1", "scheduler.total_steps=21"],
         "scheduler.total_steps=21: OneCycleLR cannot go on after it, and the run is planned for "
         "22 steps; leave it out, or set trainer.epochs or trainer.max_steps to fit it"),
    ],
    ids=["stepless", "worse", "outrun"],
)  # fmt: skip
def test_a_schedule_that_a_run_cannot_follow_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        built(*words)
    assert str(refused.value) == line
