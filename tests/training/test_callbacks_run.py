"""Callbacks and metrics in a run: from the command line to the run's folder, and over resumes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from in_process import StartRun, scalars, train

from mpframe import checkpoint
from mpframe.checkpoint.folder import best_in
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError
from mpframe.tracking.summary import Summary

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "trainer.max_steps=8"]
OFTEN = ["trainer.log_every=3", "trainer.eval_every=2", "scheduler=none"]
MINE = ["+callbacks.mine._target_=own_callbacks.Losses", "+callbacks.mine.name=mine"]
HITS = "+metrics.hits._target_=own_callbacks.LikeTorchmetrics"


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is validated in other steps than it is logged in."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, *SMALL, *OFTEN, HITS)
    return folder


def test_a_users_callback_sees_every_step_once_over_a_resume(
    start_run: StartRun, tmp_path: Path
) -> None:
    """Another one of its class, which begins with the second start, keeps a state of its own."""
    other = ["+callbacks.other._target_=own_callbacks.Losses", "+callbacks.other.name=other"]
    start_run(tmp_path, *SMALL, *MINE, "trainer.max_steps=3")
    start_run(tmp_path, *SMALL, *MINE, *other, "trainer.max_steps=5", "resume=auto")
    steps = [float(step) for step in (tmp_path / "mine.txt").read_text().split()]
    assert steps == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (tmp_path / "other.txt").read_text() == "4.0 5.0"
    state = checkpoint.read(tmp_path).state["callbacks"]
    assert state["mine"] == {"losses": steps}
    assert list(state) == [*("results", "throughput", "curves", "csv", "autopsy", "mine", "other")]


def test_a_callback_that_raises_is_named_and_the_others_are_torn_down(
    start_run: StartRun, tmp_path: Path
) -> None:
    breaks = ["+callbacks.bad._target_=own_callbacks.Breaks", "+callbacks.bad.step=3"]
    with pytest.raises(UserCodeError) as refused:
        start_run(tmp_path, *SMALL, *MINE, *breaks)
    assert str(refused.value).startswith(
        "after step 3: callbacks.bad: Breaks raised ConnectionError (no route to the server) at "
        "own_callbacks.py:"
    )
    assert (tmp_path / "mine.txt").read_text() == "1.0 2.0"
    assert Summary.read(tmp_path).reason == str(refused.value)


LEFT_OUT = ["curves", "csv", "amax_record", "autopsy", "log_lines", "progress_bar"]


def test_any_entry_of_the_group_may_be_left_out(
    plain: Path, start_run: StartRun, tmp_path: Path
) -> None:
    """And the summary lacks nothing."""
    options = [f"callbacks.{name}=null" for name in LEFT_OUT]
    summary, whole = start_run(tmp_path, *SMALL, *OFTEN, *options), Summary.read(plain)
    for name in ("train_loss", "metric", "val_metric", "val_loss", "test_loss"):
        assert getattr(summary, name) == getattr(whole, name)
    assert not (tmp_path / "metrics.csv").exists()
    assert not scalars(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "results"])
def test_a_runs_own_callbacks_are_not_replaced(
    start_run: StartRun, tmp_path: Path, name: str
) -> None:
    own = [f"+callbacks.{name}._target_=own_callbacks.Breaks", f"+callbacks.{name}.step=1"]
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *SMALL, *own)
    assert str(refused.value) == (
        f"callbacks.{name}: every run has a callback of this name; give yours another name"
    )


# --- metrics.csv


def test_the_table_has_a_row_for_each_log_and_each_validation(plain: Path) -> None:
    """With the step's numbers in each (test_interruption.py: also if it is resumed in between)."""
    *rows, tested = table(plain)
    assert (tested["step"], bool(tested["test_loss"])) == ("8", True)
    assert [row["step"] for row in rows] == ["2", "3", "4", "6", "8"]
    assert all(row["train_loss"] and row["grad_amax"] and row["skipped_steps"] for row in rows)
    assert [bool(row["val_accuracy"]) for row in rows] == [True, False, True, True, True]
    # Nine digits of a double: half a unit in the ninth.
    assert float(rows[-1]["val_loss"]) == pytest.approx(Summary.read(plain).val_loss, rel=5e-9)


def test_the_table_is_the_same_with_an_optimizer_that_skips_on_the_device(
    plain: Path, start_run: StartRun, tmp_path: Path
) -> None:
    """Whose steps are told of late; without the curves nothing else asks for them."""
    start_run(tmp_path, *SMALL, *OFTEN, "callbacks.curves=null", "+optimizer.fused=true")
    first, fused = (
        [(row["step"], bool(row["train_loss"]), bool(row["val_loss"])) for row in table(folder)]
        for folder in (plain, tmp_path)
    )
    assert first == fused


def test_a_resumed_run_has_the_table_of_the_undisturbed_one(
    plain: Path, start_run: StartRun, tmp_path: Path
) -> None:
    start_run(tmp_path, *SMALL, *OFTEN, HITS, "trainer.max_steps=3")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,0,1.0\n")  # A row that no checkpoint knows of.
    start_run(tmp_path, *SMALL, *OFTEN, HITS, "resume=auto")
    whole, again = ((f / "metrics.csv").read_text().splitlines() for f in (plain, tmp_path))
    # The end of the first start was validated, which the undisturbed run does not do at step 3.
    assert [line for line in again if line not in whole] == [again[2]]
    assert [line for line in whole if line not in again] == [whole[2]]
    assert again[2].startswith("3,")
    assert whole[2].startswith("3,")


# --- early stopping


STOPS = [
    *("callbacks=early_stopping", "callbacks.early_stopping.patience=2", "trainer.eval_every=1"),
    *("callbacks.early_stopping.min_delta=10", "trainer.keep_best=1"),
]


def test_a_run_that_is_stopped_early_is_finished_with_the_reason(
    start_run: StartRun, tmp_path: Path
) -> None:
    summary = start_run(tmp_path, *SMALL, *STOPS)
    assert (summary.status, summary.steps) == ("finished", 3)
    assert summary.reason is not None
    assert summary.reason.startswith("early stopping: val_accuracy was not better than ")
    assert Summary.read(tmp_path).reason == summary.reason
    on = start_run(tmp_path, *SMALL, *STOPS, "callbacks.early_stopping.patience=4", "resume=auto")
    assert on.steps == 5


# --- metrics


def test_metrics_stand_beside_the_datasets_own(plain: Path) -> None:
    summary = Summary.read(plain)
    assert (summary.monitor, summary.metric) == ("accuracy", "accuracy")
    assert summary.monitored == summary.val_metric
    # A share of 180, in float64 and in float32: one rounding of 2^-24.
    assert summary.other_metrics["hits"] == pytest.approx(summary.val_metric, rel=2.0**-24)
    stored = json.loads((plain / "summary.json").read_text())
    assert {"val_accuracy", "val_hits", "val_loss", "monitor"} < stored.keys()
    curves = scalars(plain)
    assert curves["metric/hits/val"] == curves["metric/accuracy/val"]
    assert "val_hits" in table(plain)[0]


@pytest.mark.parametrize("monitor", ["hits", "loss"])
def test_one_is_monitored(start_run: StartRun, tmp_path: Path, monitor: str) -> None:
    best = ["trainer.keep_best=1", "trainer.eval_every=2", f"trainer.monitor={monitor}"]
    summary = start_run(tmp_path, *SMALL, HITS, *best, "trainer.max_steps=4")
    assert summary.monitor == monitor
    assert summary.metric == ("accuracy" if monitor == "loss" else monitor)
    assert summary.monitored == (summary.val_loss if monitor == "loss" else summary.val_metric)
    (kept,) = best_in(tmp_path, 1)
    facts: Any = checkpoint.read(kept).facts["validation"]
    assert (facts["metric"], facts["higher_is_better"]) == (monitor, monitor != "loss")
    assert Summary.read(tmp_path) == summary


def test_an_object_of_a_dataset_is_reset_before_each_validation(
    plain: Path, start_run: StartRun, tmp_path: Path
) -> None:
    options = ["dataset._target_=own_callbacks.with_objects", "trainer.eval_every=2"]
    options += ["model.in_features=64", "model.classes=10"]
    start_run(tmp_path, *SMALL, *OFTEN, *options)
    hits = scalars(tmp_path)["metric/hits/val"]
    assert hits == scalars(plain)["metric/accuracy/val"]


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        (["trainer.monitor=acuracy"], ConfigError, "trainer.monitor=acuracy: no such metric; choose accuracy, loss; nearest: accuracy"),
        (["+metrics.loss._target_=own_callbacks.LikeTorchmetrics"], ConfigError, "metrics.loss: its metric is named loss, and val_loss is the validation loss; give the metric another name"),
        (["+metrics.f1._target_=own_callbacks.OnlyCompute"], UserCodeError, "metrics.f1: OnlyCompute has no update(); a metric has update(outputs, targets) and compute()"),
        (["+metrics.f1._target_=own_callbacks.Nope"], ConfigError, "metrics.f1._target_=own_callbacks.Nope: "),
        (["+metrics.f1._target_=own_callbacks.Vector"], UserCodeError, "metrics.f1: Vector gave float32 [10] as its value; it must be one number"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused_in_one_line(
    start_run: StartRun, tmp_path: Path, options: list[str], error: type[MpframeError], line: str
) -> None:
    with pytest.raises(error) as refused:
        start_run(tmp_path, *SMALL, *options, "trainer.max_steps=1")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
