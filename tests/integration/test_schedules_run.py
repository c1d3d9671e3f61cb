"""Schedules of torch's own, by their `_target_`: what steps them, how they are resumed."""

from pathlib import Path

import pytest
from conftest import StartRun, scalars
from sameness import assert_same_run
from test_resume import cut

from mpframe import checkpoint
from mpframe.errors import ConfigError
from mpframe.tracking.summary import Summary

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
        start_run(tmp_path, *SMALL, *ONECYCLE, "trainer.epochs=2", "resume=auto")
    assert str(error.value) == (
        "scheduler.total_steps=22: OneCycleLR cannot go on after it, and the run is planned for "
        "44 steps; set trainer.epochs or trainer.max_steps to fit it, or start anew with init_from"
    )
    assert checkpoint.read(tmp_path).global_step == 22
    assert Summary.read(tmp_path).status == "finished"  # the record of the run that was
    again = start_run(tmp_path, *SMALL, *ONECYCLE, "trainer.epochs=1", "resume=auto")
    assert (again.status, again.steps) == ("finished", 22)


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
