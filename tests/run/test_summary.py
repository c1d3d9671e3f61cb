"""What a run says of itself when it ends: times that add up, and whether it trained at all."""

from pathlib import Path

import pytest
from fixtures import Log, refused
from in_process import csv_rows, train

from mpframe import checkpoint
from mpframe.core.errors import DivergedError, MpframeError, UserCodeError
from mpframe.tracking.summary import Summary

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32"]
LINEAR = ["model._target_=erring.linear", "dtype=fp32"]


def test_times_and_counts_add_up_over_resumes(tmp_path: Path) -> None:
    first = train(tmp_path, *SMALL, "trainer.epochs=1", "trainer.accumulate=4")
    before = checkpoint.read(tmp_path).state["callbacks"]["throughput"]["seconds"]
    second = train(tmp_path, *SMALL, "trainer.epochs=2", "trainer.accumulate=4", "resume=auto")
    assert (first.steps, second.steps, second.epochs) == (6, 12, 2)
    assert (first.samples, second.samples) == (22 * 64, 44 * 64)  # A partial window counts, too.
    assert second.seconds > before  # which is up to the last checkpoint: the end is not counted
    assert (first.train_seconds or 1e9) < (second.train_seconds or 0.0) < second.seconds
    assert second.samples_per_second == second.samples / (second.train_seconds or 0.0)
    assert second.median_step_seconds is not None
    # A finished job that is started again keeps its time, up to the last checkpoint: what came
    # behind it is the writing of the end.
    saved = checkpoint.read(tmp_path).state["callbacks"]["throughput"]["seconds"]
    again = train(tmp_path, *SMALL, "trainer.epochs=2", "trainer.accumulate=4", "resume=auto")
    times = (saved, second.train_seconds, second.samples_per_second)
    assert (again.seconds, again.train_seconds, again.samples_per_second) == times


def test_a_run_that_never_started_has_measured_nothing(tmp_path: Path) -> None:
    with pytest.raises(MpframeError):
        train(tmp_path, "model._target_=nowhere.Net")
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.samples, summary.train_seconds) == ("failed", None, None)


@pytest.mark.parametrize(("options", "cause"), [
    (["model=mlp", "dtype=mixed", "loss_scaling=static", "loss_scaling.scale=1073741824"],
     "the loss is finite and its gradients overflow at scale 1.07374e+09: lower loss_scaling.scale "
     "or pin the overflowing module to fp32 in ops.modules"),
    ([*LINEAR, "dataset._target_=erring.nan_after", "dataset.batches=0"],
     "the loss itself is not finite, so scaling cannot help: lower optimizer.lr, look at the data, "
     "or pin the overflowing module to fp32 in ops.modules"),
])  # fmt: skip
def test_a_run_with_no_step_is_diverged(tmp_path: Path, options: list[str], cause: str) -> None:
    """An epoch has fewer steps than the guard against endless skips waits for."""
    words = [*options, "trainer.epochs=1", "callbacks.autopsy=null"]
    said = refused(DivergedError, train, tmp_path, *words)
    assert said == f"no step was applied, 22 were skipped: {cause}"
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps, summary.skipped_steps) == ("diverged", 0, 22)
    assert summary.reason == said
    assert not checkpoint.all_in(tmp_path)


@pytest.mark.parametrize("scaler", ["Backoff", "LogMax"])
def test_a_first_search_cut_off_is_no_divergence(tmp_path: Path, caplog: Log, scaler: str) -> None:
    """The scale goes down from 65536, and would fit after ten steps; its floor is 1."""
    options = ["model._target_=planted.Steep", "dtype=mixed", f"loss_scaling={scaler}"]
    short = [*options, "dataset.batch_size=512", "trainer.epochs=1", "callbacks.autopsy=null"]
    done = train(tmp_path / "ended", *short)
    assert (done.status, done.steps, done.skipped_steps) == ("finished", 0, 2)
    said = "0 steps applied, 2 skipped: most of the run was in vain; start"
    assert str(done.reason).startswith(said)
    assert f"warning: {done.reason}" in caplog.messages
    limited = [*short, "trainer.max_consecutive_skips=2"]
    assert refused(DivergedError, train, tmp_path / "limited", *limited) == (
        "trainer.max_consecutive_skips=2 reached: the loss is finite and its gradients overflow at "
        "scale 32768, from where it still goes down: lower loss_scaling.init_scale"
    )


def test_a_run_that_ended_in_skips_or_a_closure_at_nan_is_diverged(tmp_path: Path) -> None:
    options = [*LINEAR, "dataset._target_=erring.nan_after", "trainer.epochs=1"]
    said = "^the last 2 steps were skipped: the loss itself is not finite"
    with pytest.raises(DivergedError, match=said):
        train(tmp_path / "two", *options, "dataset.batches=20", "callbacks.autopsy=null")
    assert Summary.read(tmp_path / "two").status == "diverged"
    # A single one may be a scaler's try at a higher scale.
    assert train(tmp_path / "one", *options, "dataset.batches=21").status == "finished"
    # An optimizer that evaluates the loss itself skips nothing.
    options += ["dataset.batches=5", "trainer.max_steps=5", "scheduler=none"]
    lbfgs = ["optimizer._target_=torch.optim.LBFGS", "optimizer.max_iter=2"]
    with pytest.raises(DivergedError, match=r"^the last step was applied at a loss that is not"):
        train(tmp_path / "closure", *options, *lbfgs)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_best(tmp_path: Path) -> None:
    """Whether the best value lies before the checkpoint that the run goes on from, or behind it."""
    options = [*SMALL, "scheduler=none", "optimizer.lr=0.1", "trainer.max_steps=40"]
    options += ["trainer.eval_every=4", "trainer.checkpoint_every=6"]
    whole = train(tmp_path / "whole", *options)
    rows = csv_rows(tmp_path / "whole" / "metrics.csv")
    seen = {int(row["step"]): float(row["val_accuracy"]) for row in rows if row["val_loss"]}
    assert whole.best_step == max(seen, key=lambda step: seen[step]) == 32
    assert f"{whole.best:.9g}" == f"{seen[32]:.9g}"
    for stop in (17, 37):
        breaks = ["+callbacks.bad._target_=own_parts.Breaks", f"+callbacks.bad.step={stop}"]
        with pytest.raises(UserCodeError):
            train(tmp_path / str(stop), *options, *breaks)
        assert (Summary.read(tmp_path / str(stop)).best_step == 32) is (stop == 37)
        resumed = train(tmp_path / str(stop), *options, "resume=auto")
        assert (resumed.best, resumed.best_step) == (whole.best, 32)
