"""Schedules in a run: chosen by options, sized to the plan, stepped, resumed and refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, refused
from in_process import assert_same_run, composed, cut, scalars, train, trained
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR

from mpframe import checkpoint
from mpframe.config.command_line import check_config
from mpframe.config.planned import fill_in
from mpframe.core.errors import ConfigError
from mpframe.data.metrics import Accuracy
from mpframe.run.optimizer import build_schedule
from mpframe.training.callbacks import schedules

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "optimizer=sgd", "trainer.log_every=1"]
TORCH = "torch.optim.lr_scheduler"
PLATEAU = [f"scheduler._target_={TORCH}.ReduceLROnPlateau", "scheduler.patience=0"]
PLATEAU += ["scheduler.factor=0.5", "scheduler.threshold=0.9"]
PLATEAU_RUN = [*SMALL, *PLATEAU, "trainer.eval_every=2", "trainer.max_steps=16"]
PLATEAU_RUN += ["trainer.checkpoint_every=4", "trainer.keep_last=100"]


plateau = trained(*PLATEAU_RUN)


def test_plateau_follows_the_validations_and_resumes(plateau: Path, tmp_path: Path) -> None:
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
    resumed = cut(plateau, tmp_path / "resumed", 8)
    train(resumed, *PLATEAU_RUN, "resume=auto")
    assert_same_run(plateau, resumed)


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


@pytest.mark.parametrize("share", ["true", "1.5", "a"])
def test_a_share_that_is_no_number_up_to_one_is_refused(share: str) -> None:
    words = ["scheduler=transformer", f"scheduler.warmup_steps=${{plan:total_steps,{share}}}"]
    with pytest.raises(ConfigError, match="a share of the plan is a number from 0 to 1, not "):
        built(*words)


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


def hugging_face(optimizer: Optimizer) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.get_cosine_schedule_with_warmup(optimizer, 2, 22)


def timm_by_epochs(optimizer: Optimizer) -> object:
    scheduler = pytest.importorskip("timm.scheduler")
    return scheduler.StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5)


@pytest.mark.parametrize(("make", "words"), [
    (lambda own: schedules.exponential(own, 0.9, begin=0.5, unit=11), "scheduler=exponential scheduler.begin=0.5"),
    (lambda own: schedules.transformer(own, d_model=4, warmup_steps=2), "scheduler=transformer scheduler.d_model=4"),
    (lambda own: schedules.piecewise_constant(own, [0.5, 1], [0.1, 0.01], unit=11), "scheduler=piecewise_constant scheduler.boundaries=[0.5,1]"),
    (lambda own: OneCycleLR(own, max_lr=0.1, total_steps=22), f"scheduler._target_={TORCH}.OneCycleLR scheduler.max_lr=0.1"),
    (hugging_face, "scheduler._target_=transformers.get_cosine_schedule_with_warmup scheduler.num_warmup_steps=${plan:total_steps,0.1} scheduler.num_training_steps=${plan:total_steps}"),
    (timm_by_epochs, "scheduler._target_=timm.scheduler.StepLRScheduler scheduler.decay_t=1 scheduler.decay_rate=0.5"),
])  # fmt: skip
def test_a_chosen_schedule_gets_the_numbers_of_the_plan_and_resumes(make: Any, words: str) -> None:
    wanted = by_hand(make)
    assert len(set(wanted)) > 1
    optimizer, other = (SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    schedule, resumed = (built(*words.split(), optimizer=own) for own in (optimizer, other))
    seen = []
    for step in range(22):
        if step == 9:
            other.load_state_dict(optimizer.state_dict())
            resumed.load_state_dict(schedule.state_dict())
            optimizer, schedule = other, resumed
        optimizer.step()
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == wanted


def watched(optimizer: Optimizer, key: str) -> object:
    return ConstantLR(optimizer)


def test_no_secret_of_a_schedules_arguments_is_saved(monkeypatch: Patch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    words = ["scheduler._target_=test_schedules_run.watched", "scheduler.key=correct-horse-battery"]
    assert "correct-horse" not in str(built(*words).state_dict())


COSINE = f"scheduler._target_={TORCH}.CosineAnnealingLR"
UNFIT = "scheduler.T_max: ValueError raised while resolving interpolation: {}; set scheduler.T_max=VALUE"


@pytest.mark.parametrize(("words", "line"), [
    (["scheduler._target_=builtins.bool"], "scheduler._target_=builtins.bool: has no step and no state_dict and no load_state_dict; see docs/optimizer.md"),
    ([*PLATEAU, "scheduler.mode=min"], "scheduler.mode=min: the schedule watches val_accuracy, where more is better; use scheduler.mode=max"),
    ([f"scheduler._target_={TORCH}.OneCycleLR", "scheduler.max_lr=0.1", "scheduler.total_steps=21"], "scheduler.total_steps=21: OneCycleLR cannot go on after it, and the run is planned for 22 steps; leave it out, or set trainer.epochs or trainer.max_steps to fit it"),
    ([COSINE, "scheduler.T_max=${plan:total_step}"], UNFIT.format("the plan has no total_step: nearest: total_steps")),
    ([COSINE, "scheduler.T_max=${plan:total_steps,2}"], UNFIT.format("a share of the plan is a number from 0 to 1, not 2")),
    ([COSINE, "scheduler.T_max=${plan:total_steps,x}"], UNFIT.format("a share of the plan is a number from 0 to 1, not x")),
], ids=["stepless", "worse", "outrun", "unknown", "above one", "no number"])  # fmt: skip
def test_a_schedule_that_a_run_cannot_follow_is_refused(words: list[str], line: str) -> None:
    assert refused(ConfigError, built, *words) == line
