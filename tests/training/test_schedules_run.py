"""Schedules of torch's own, by their `_target_`: what steps them, how they are resumed."""

import re
from pathlib import Path

import pytest
import torch
from in_process import StartRun, scalars
from sameness import assert_same_run, cut

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.planned import fill_in
from mpframe.core.errors import ConfigError
from mpframe.run.optimizer import build_schedule
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import schedules

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "optimizer=sgd", "trainer.log_every=1"]
PLATEAU = [
    *("scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "scheduler.patience=0"),
    *("scheduler.factor=0.5", "scheduler.threshold=0.9", "trainer.eval_every=5"),
]
ONECYCLE = ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "scheduler.max_lr=0.1"]


def test_plateau_follows_the_validations(start_run: StartRun, tmp_path: Path) -> None:
    """Where the accuracy has not grown by nine tenths since the best, the rate is halved."""
    start_run(tmp_path, *SMALL, *PLATEAU, "trainer.max_steps=30", "trainer.epochs=2")
    state = checkpoint.load(tmp_path)["trainer"]["schedule"][""]
    curves = scalars(tmp_path)
    accuracies = [value for _, value in curves["metric/accuracy/val"]]
    rates = [rate for _, rate in curves["optim/lr"]]
    best, rate, expected = 0.0, rates[0], []
    for step in range(30):
        expected.append(rate)
        if step % 5 == 4:
            better = accuracies[step // 5] > best * 1.9
            best, rate = (accuracies[step // 5], rate) if better else (best, rate / 2)
    float32 = 2.0**-23  # of the event files
    assert rates == pytest.approx(expected, rel=float32)
    assert len(set(expected)) > 2
    assert state["best"] == pytest.approx(best, rel=float32)
    assert (state["mode"], state["last_epoch"]) == ("max", 6)


def test_plateau_resumes_bit_for_bit(start_run: StartRun, tmp_path: Path) -> None:
    options = [*SMALL, *PLATEAU, "trainer.max_steps=16", "trainer.checkpoint_every=4"]
    options += ["trainer.keep_last=100"]
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 8)
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


def test_plateau_is_not_let_watch_for_the_worse(start_run: StartRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        start_run(tmp_path, *SMALL, *PLATEAU, "scheduler.mode=min")
    assert str(error.value) == (
        "scheduler.mode=min: the schedule watches val_accuracy, where more is better; "
        "use scheduler.mode=max"
    )


def test_another_pace_of_validation_is_said_to_change_such_a_run(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path, *SMALL, *PLATEAU, "trainer.max_steps=10")
    start_run(tmp_path, *SMALL, *PLATEAU, "trainer.max_steps=10", "trainer.eval_every=3",
              "resume=auto")  # fmt: skip
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    assert "trainer.eval_every=3 (was 5)" in line


def test_a_1cycle_schedule_is_not_outrun(start_run: StartRun, tmp_path: Path) -> None:
    """Before it trains, and not at the step in which torch raises."""
    start_run(tmp_path, *SMALL, *ONECYCLE, "trainer.epochs=1")
    with pytest.raises(ConfigError) as error:
        start_run(tmp_path, *SMALL, *ONECYCLE, "trainer.epochs=2", "scheduler.total_steps=22",
                  "resume=auto")  # fmt: skip
    assert str(error.value) == (
        "scheduler.total_steps=22: OneCycleLR cannot go on after it, and the run is planned for "
        "44 steps; leave it out, or set trainer.epochs or trainer.max_steps to fit it"
    )
    assert checkpoint.read(tmp_path).global_step == 22
    assert Summary.read(tmp_path).status == "finished"  # the record of the run that was
    again = start_run(tmp_path, *SMALL, *ONECYCLE, "trainer.epochs=2", "resume=auto")
    assert (again.status, again.steps) == ("finished", 44)


def test_lbfgs_trains_and_resumes_bit_for_bit(start_run: StartRun, tmp_path: Path) -> None:
    options = [
        "model=mlp", "model.hidden=8", "dtype=fp32", "loss_scaling=none", "scheduler=none",
        "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.1", "optimizer.max_iter=4",
        "trainer.max_steps=8", "trainer.checkpoint_every=2", "trainer.keep_last=100",
        "trainer.log_every=1", "trainer.eval_every=4",
    ]  # fmt: skip
    done = start_run(tmp_path / "whole", *options)
    assert (done.steps, done.skipped_steps) == (8, 0)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 4)
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    assert Summary.read(resumed).train_loss == done.train_loss


PLAN = {"total_steps": 22, "epochs": 2, "steps_per_epoch": 11}


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ("${plan:total_steps}", 22),
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
    words = ["scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "model=mlp"]
    with pytest.raises(ConfigError) as refused:
        check_config(without_hydra(compose_named([*words, f"scheduler.T_max={value}"])[1]))
    assert line in str(refused.value)
    assert str(refused.value).startswith("scheduler.T_max: ")
    assert "\n" not in str(refused.value)


def rates(folder: Path) -> list[float]:
    return [rate for _, rate in scalars(folder)["optim/lr"]]


def by_hand(make: object, steps: int, lr: float = 0.1) -> list[float]:
    """The rate after each step of a loop by hand, 11 steps to an epoch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedule, seen = make(optimizer), []  # type: ignore[operator]
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


def torch_cosine(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=22)


def hugging_face(optimizer: torch.optim.Optimizer) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=22
    )


def timm_by_updates(optimizer: torch.optim.Optimizer) -> object:
    scheduler = pytest.importorskip("timm.scheduler")
    return scheduler.CosineLRScheduler(optimizer, t_initial=22, warmup_t=2, t_in_epochs=False)


def timm_by_epochs(optimizer: torch.optim.Optimizer) -> object:
    return pytest.importorskip("timm.scheduler").StepLRScheduler(
        optimizer, decay_t=1, decay_rate=0.5
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch_cosine, "torch.optim.lr_scheduler.CosineAnnealingLR scheduler.T_max=${plan:total_steps}"),
        (hugging_face, "transformers.get_cosine_schedule_with_warmup "
         "scheduler.num_warmup_steps=${plan:total_steps,0.1} "
         "scheduler.num_training_steps=${plan:total_steps}"),
        (timm_by_updates, "timm.scheduler.CosineLRScheduler scheduler.t_initial=${plan:total_steps} "
         "scheduler.warmup_t=2 scheduler.t_in_epochs=false"),
        (timm_by_epochs, "timm.scheduler.StepLRScheduler scheduler.decay_t=1 "
         "scheduler.decay_rate=0.5"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_schedules_of_others_are_those_of_a_loop_by_hand_and_resume(
    start_run: StartRun, tmp_path: Path, make: object, words: str
) -> None:
    wanted = by_hand(make, 22)
    assert len(set(wanted)) > 1
    target, *arguments = words.split()
    options = [*SMALL, f"scheduler._target_={target}", *arguments, "optimizer.lr=0.1",
               "trainer.epochs=2", "trainer.accumulate=2", "trainer.checkpoint_every=4",
               "trainer.keep_last=10"]  # fmt: skip
    start_run(tmp_path / "whole", *options)
    assert rates(tmp_path / "whole") == torch.tensor(wanted).tolist()  # As float32, in the file.
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 12)
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


SHIPPED = {
    "poly": (["scheduler.warmup=0.1"], {"total_steps": 22, "warmup": 0.1}),
    "exponential": (["scheduler.begin=0.5"], {"factor": 0.9, "begin": 0.5, "unit": 11}),
    "transformer": (["scheduler.d_model=4"], {"d_model": 4, "warmup_steps": 2}),
    "piecewise_constant": (
        ["scheduler.boundaries=[0.5,1]"], {"boundaries": [0.5, 1], "factors": [0.1, 0.01], "unit": 11}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_schedule_gets_the_numbers_of_the_plan_and_resumes(name: str) -> None:
    words, arguments = SHIPPED[name]
    make = getattr(schedules, name)
    wanted = by_hand(lambda optimizer: make(optimizer, **arguments), 22)
    _, composed = compose_named([f"scheduler={name}", *words])
    config = check_config(without_hydra(composed))
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2)]
    first, second = (build_schedule(config, own, PLAN, {}) for own in optimizers)
    assert first is not None
    assert second is not None
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
    assert len(set(wanted)) > 1


LONGER = {"total_steps": 44, "epochs": 4, "steps_per_epoch": 11}
SIZED = {
    "warmup_cosine": [],
    "warmup_cosine to a tenth": ["scheduler.min_factor=0.1"],
    "onecycle": [],
    "poly": ["scheduler.power=2"],
    "exponential": ["scheduler.unit=${plan:total_steps}"],
    "transformer": ["scheduler.d_model=4"],
    "piecewise_constant": ["scheduler.boundaries=[0.3,0.6]", "scheduler.unit=${plan:total_steps}"],
    "CosineAnnealingLR": ["scheduler.T_max=${plan:total_steps}"],
    "LinearLR": ["scheduler.total_iters=${plan:total_steps}"],
    "OneCycleLR": ["scheduler.max_lr=0.1", "scheduler.cycle_momentum=true"],
    "transformers.get_cosine_schedule_with_warmup": [
        "scheduler.num_warmup_steps=2", "scheduler.num_training_steps=${plan:total_steps}"
    ],
    "timm.scheduler.CosineLRScheduler": [
        "scheduler.t_initial=${plan:total_steps}", "scheduler.t_in_epochs=false"
    ],
}  # fmt: skip


def planned(
    name: str, words: list[str], plan: dict[str, int], lr: float = 0.1
) -> tuple[torch.optim.Optimizer, schedules.Schedule]:
    """A schedule as a run makes it: a shipped one, one of torch's, or any by its path."""
    name = name.split()[0]
    if "." in name:
        pytest.importorskip(name.split(".")[0])
    path = name if "." in name else f"torch.optim.lr_scheduler.{name}"
    chosen = (
        f"scheduler={name}" if name.islower() and "." not in name else f"scheduler._target_={path}"
    )
    config = check_config(without_hydra(compose_named([chosen, *words])[1]))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr, momentum=0.9)
    schedule = build_schedule(config, optimizer, plan, {})
    assert schedule is not None
    return optimizer, schedule


def settings(
    optimizer: torch.optim.Optimizer, schedule: schedules.Schedule, steps: int
) -> list[object]:
    """What the group is set to in each of the next steps."""
    seen = []
    for _ in range(steps):
        seen.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("done", [9, 22])
def test_a_longer_plan_has_its_own_schedule_from_the_present_step_on(
    name: str, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit the rates of a run that was planned so from the beginning; momenta, too."""
    wanted = settings(*planned(name, SIZED[name], LONGER), 44)
    optimizer, schedule = planned(name, SIZED[name], PLAN)
    assert settings(optimizer, schedule, done) != wanted[:done]
    resumed, longer = planned(name, SIZED[name], LONGER, lr=0.7)  # The saved rate counts.
    resumed.load_state_dict(optimizer.state_dict())
    longer.load_state_dict(schedule.state_dict())
    assert settings(resumed, longer, 44 - done) == wanted[done:]
    (line,) = caplog.messages
    assert re.fullmatch(
        rf"warning: scheduler\.\w+=(44|4) \(was (22|2)\): from step {done} on the learning rate "
        "follows this schedule", line
    ), line  # fmt: skip


def test_a_schedule_that_was_made_longer_is_saved_as_such(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, schedule = planned("onecycle", [], PLAN)
    settings(optimizer, schedule, 9)
    second, longer = planned("onecycle", [], LONGER, lr=0.7)
    second.load_state_dict(optimizer.state_dict())
    longer.load_state_dict(schedule.state_dict())
    settings(second, longer, 9)
    caplog.clear()
    third, again = planned("onecycle", [], LONGER)
    third.load_state_dict(second.state_dict())
    again.load_state_dict(longer.state_dict())
    assert settings(third, again, 26) == settings(second, longer, 26)
    assert caplog.messages == []


def test_a_longer_run_says_what_its_schedule_does(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of the cosine's end, where its rate is 0."""
    start_run(tmp_path, *SMALL, "trainer.max_steps=11")
    assert rates(tmp_path)[-1] < 1e-9
    start_run(tmp_path, *SMALL, "trainer.max_steps=22", "resume=auto")
    wanted = by_hand(lambda optimizer: schedules.warmup_cosine(optimizer, 22), 22)
    assert rates(tmp_path)[11:] == pytest.approx(wanted[11:], rel=1e-6)
    (line,) = (line for line in caplog.messages if "learning rate follows" in line)
    assert line == (
        "warning: scheduler.total_steps=22 (was 11): from step 11 on the learning rate follows this "
        "schedule"
    )


def test_no_secret_of_a_schedules_arguments_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    words = ["scheduler.step_size=3", "+scheduler.gamma=0.5"]
    _, schedule = planned("StepLR", words, PLAN)
    assert "correct-horse" not in str(schedule.state_dict())
    _, schedule = planned(
        "test_schedules_run.Watched", ["scheduler.key=correct-horse-battery"], PLAN
    )
    assert "correct-horse" not in str(schedule.state_dict())


class Watched(torch.optim.lr_scheduler.ConstantLR):
    """Takes what should not be stored."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: str) -> None:
        super().__init__(optimizer)


class Stepless:
    """Lacks what a run calls."""

    def __init__(self, optimizer: object) -> None: ...


def test_what_is_no_schedule_is_refused(start_run: StartRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *SMALL, "scheduler._target_=test_schedules_run.Stepless")
    assert str(refused.value) == (
        "scheduler._target_=test_schedules_run.Stepless: has no step and no state_dict and no "
        "load_state_dict; see docs/optimizer.md"
    )
