"""Callbacks and metrics, on their own and in a run: order, states, errors, what they write."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from in_process import csv_rows, scalars, train, trained
from own_parts import LikeTorchmetrics
from prepared import context, prepared
from torch import nn

from mpframe import Callback, Curves, EarlyStopping, checkpoint
from mpframe.checkpoint.folder import best_in
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.data import RMSPE, Accuracy, Dice, Perplexity
from mpframe.run.resume import restore
from mpframe.tracking.summary import Summary
from mpframe.training.evaluation import Best, NamedMetric
from mpframe.training.run_context import set_up
from mpframe.training.trainer import run_callbacks
from mpframe.workloads.gan import Fooled

FAILING = r"^callbacks\.mine: Failing raised ConnectionError \(no route to the server\) at [^\n]*$"


def told(name: str, said: list[str]) -> Any:
    """A callback that writes what it is told."""
    own: Any = Callback()
    own.setup = lambda _, run: said.append(f"setup {name} in {run.folder.name}")
    own.teardown = lambda _, error: said.append(f"teardown {name} {error!r}")
    return own


class Failing(Callback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, *arguments: object) -> None:
        raise ConnectionError("no route to the server")


def trainer_with(callbacks: dict[str, Callback]) -> Any:
    return prepared(nn.Linear(2, 1), nn.MSELoss(), callbacks=callbacks)


STATE = {"best": asdict(Best("accuracy", 0.5, 3)), "waited": 1}


@pytest.mark.parametrize(("saved", "said"), [
    ({"a": STATE}, []),
    ({"a": STATE, "gone": {"x": 1}, "lost": {}}, ["warning: the checkpoint holds the state of callbacks.gone, callbacks.lost, and this run has no such callback: the next checkpoint is without"]),
    ({}, ["warning: the checkpoint holds no state of callbacks.a, which begins without"]),
])  # fmt: skip
def test_states_of_no_callback_and_the_reverse_are_said(saved: Any, said: Any, caplog: Log) -> None:
    own = EarlyStopping()
    restore({"a": own, "none": Callback()}, saved)
    assert (own.state_dict() == STATE, caplog.messages) == ("a" in saved, said)
    for state in (7, {"other": 1}):
        with pytest.raises(CheckpointError, match=r"^its state of callbacks\.a does not fit \("):
            restore({"a": own}, {"a": state})


def test_every_callback_is_torn_down_and_the_first_error_told(tmp_path: Path, caplog: Log) -> None:
    said: list[str] = []
    a, b, run = told("a", said), told("b", said), context(tmp_path / "run")
    with set_up(trainer_with({"a": a, "b": b}), run):
        said.append("trained")
    assert said[:3] == ["setup a in run", "setup b in run", "trained"]
    assert said[3:] == ["teardown b None", "teardown a None"]
    said.clear()
    failing = trainer_with({"a": a, "mine": Failing("setup"), "b": b})
    with pytest.raises(UserCodeError, match=FAILING), set_up(failing, run):
        said.append("trained")
    assert [line[:10] for line in said] == ["setup a in", "teardown a"]
    failing = trainer_with({"a": a, "mine": Failing("teardown")})
    with pytest.raises(KeyError, match="first"), set_up(failing, run):
        raise KeyError("first")
    assert said[-1] == "teardown a KeyError('first')"
    (line,) = caplog.messages
    assert line.startswith("warning: callbacks.mine: Failing raised ConnectionError (no route to")
    with pytest.raises(UserCodeError, match=FAILING), set_up(failing, run):
        pass  # Then the teardown's is the first.
    with pytest.raises(UserCodeError, match=FAILING):
        run_callbacks({"mine": Failing("on_epoch_end")}, "on_epoch_end", None)
    with pytest.raises(AttributeError, match="_tracker"):  # One of our own passes as it is.
        run_callbacks({"curves": Curves(log_every=1)}, "on_save", None)


SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "trainer.max_steps=8"]
OFTEN = ["trainer.log_every=3", "trainer.eval_every=2", "scheduler=none"]
HITS = "+metrics.hits._target_=own_parts.LikeTorchmetrics"
# A dataset whose metric is an object, which is reset before each validation.
OBJECT = ["dataset._target_=own_parts.with_objects", "model.in_features=64", "model.classes=10"]
plain = trained(*SMALL, *OFTEN, *OBJECT)


def test_the_table_has_a_row_for_each_log_and_each_validation_and_every_metric(plain: Path) -> None:
    (*rows, tested), summary = csv_rows(plain / "metrics.csv"), Summary.read(plain)
    curves = scalars(plain)
    assert (tested["step"], bool(tested["test_loss"])) == ("8", True)
    assert [row["step"] for row in rows] == ["2", "3", "4", "6", "8"]
    assert all(row["train_loss"] and row["grad_amax"] and row["skipped_steps"] for row in rows)
    assert [bool(row["val_accuracy"]) for row in rows] == [True, False, True, True, True]
    # Nine digits of a double: half a unit in the ninth.
    assert float(rows[-1]["val_loss"]) == pytest.approx(summary.val_loss, rel=5e-9)
    assert (summary.metric, summary.monitored) == ("accuracy", summary.val_metric)
    # A share of 180, in float64 and in float32: one rounding of 2^-24.
    assert summary.other_metrics["hits"] == pytest.approx(summary.val_metric, rel=2.0**-24)
    assert curves["metric/hits/val"] == curves["metric/accuracy/val"]
    assert "val_hits" in rows[0]


def test_a_resumed_run_has_the_table_of_the_undisturbed_one(plain: Path, tmp_path: Path) -> None:
    train(tmp_path, *SMALL, *OFTEN, *OBJECT, "trainer.max_steps=3")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,0,1.0\n")  # A row that no checkpoint knows of.
    train(tmp_path, *SMALL, *OFTEN, *OBJECT, "resume=auto")
    whole, again = ((f / "metrics.csv").read_text().splitlines() for f in (plain, tmp_path))
    # The end of the first start was validated, which the undisturbed run does not do at step 3.
    differing = [(one, two) for one, two in zip(whole, again, strict=True) if one != two]
    assert differing == [(whole[2], again[2])]
    assert whole[2][:2] == again[2][:2] == "3,"


def test_a_run_that_is_stopped_early_is_finished_with_the_reason(tmp_path: Path) -> None:
    patience = "callbacks.early_stopping.patience"
    stops = ["callbacks=early_stopping", "trainer.eval_every=1", "trainer.keep_best=1"]
    stops += ["callbacks.early_stopping.min_delta=10", f"{patience}=2"]
    summary = train(tmp_path, *SMALL, *stops)
    assert (summary.status, summary.steps) == ("finished", 3)
    reason = str(Summary.read(tmp_path).reason)
    assert reason.startswith("early stopping: val_accuracy was not better than ")
    assert train(tmp_path, *SMALL, *stops, f"{patience}=4", "resume=auto").steps == 5


@pytest.mark.parametrize("monitor", ["hits", "loss"])
def test_one_is_monitored(tmp_path: Path, monitor: str) -> None:
    best = ["trainer.keep_best=1", "trainer.eval_every=2", f"trainer.monitor={monitor}"]
    summary = train(tmp_path, *SMALL, HITS, *best, "trainer.max_steps=4")
    assert summary.monitor == monitor
    assert summary.metric == ("accuracy" if monitor == "loss" else monitor)
    assert summary.monitored == (summary.val_loss if monitor == "loss" else summary.val_metric)
    (kept,) = best_in(tmp_path, 1)
    facts: Any = checkpoint.read(kept).facts["validation"]
    assert (facts["metric"], facts["higher_is_better"]) == (monitor, monitor != "loss")
    assert Summary.read(tmp_path) == summary


def test_a_misspelt_event_is_warned_of_with_the_nearest(caplog: Log) -> None:
    names = ("on_optimiser_step", "on_test", "on_zzz", "plot")
    mine = type("Mine", (Callback,), dict.fromkeys(names, print))()
    with set_up(trainer_with({"mine": mine}), None):
        assert caplog.messages == [
            "warning: callbacks.mine: there is no event on_optimiser_step; nearest: "
            "on_optimizer_step",
            "warning: callbacks.mine: there is no event on_zzz",
        ]


@pytest.mark.parametrize(("value", "line"), [
    (torch.zeros((), device="meta"), "SimpleNamespace raised RuntimeError ("),
    (torch.tensor(1j), "SimpleNamespace raised RuntimeError ("),
    (torch.ones(10), "SimpleNamespace raised ValueError (only one element tensors can be conv"),
])  # fmt: skip
def test_a_value_that_is_no_real_number_is_blamed_on_its_metric(value: Any, line: str) -> None:
    own = SimpleNamespace(update=print, compute=lambda: value, reset=lambda: None)
    assert refused(UserCodeError, NamedMetric("f1", own).compute).startswith(f"metrics.f1: {line}")


def test_an_inherited_merge_is_not_trusted_with_an_update_of_the_class_itself() -> None:
    renamed = type("Renamed", (Accuracy,), {"name": "renamed"})
    counts_more = type("CountsMore", (Accuracy,), {"update": print})
    merges_more = type("MergesMore", (counts_more,), {"merge": print})
    for kind in (Accuracy, Perplexity, RMSPE, Dice, Fooled, renamed, merges_more):
        assert NamedMetric("own", kind).merges, kind
    for kind in (counts_more, LikeTorchmetrics):
        assert not NamedMetric("own", kind).merges, kind


OWN, MINE_IS = "_target_=own_parts", "+callbacks.mine._target_"


@pytest.mark.parametrize(("options", "error", "line"), [
    (["trainer.monitor=acuracy"], ConfigError, "trainer.monitor=acuracy: no such metric; choose accuracy, loss"),
    ([f"+metrics.loss.{OWN}.LikeTorchmetrics"], ConfigError, "metrics.loss: its metric is named loss, and val_loss is the validation loss; give the metric another name"),
    ([f"+metrics.f1.{OWN}.OnlyCompute"], UserCodeError, "metrics.f1: OnlyCompute has no update(); a metric has update(outputs, targets) and compute()"),
    ([f"+metrics.f1.{OWN}.Nope"], ConfigError, "metrics.f1._target_=own_parts.Nope: "),
    ([f"+callbacks.checkpoints.{OWN}.Breaks", "+callbacks.checkpoints.step=1"], ConfigError, "callbacks.checkpoints: every run has a callback of this name; give yours another name"),
    ([f"{MINE_IS}=builtins.dict"], ConfigError, "callbacks.mine._target_=builtins.dict: must return an object of class Callback, got dict\n"),
    ([f"{MINE_IS}=nowhere.Mine"], ConfigError, "callbacks.mine._target_=nowhere.Mine: "),
    ([f"{MINE_IS}=mpframe.training.callbacks.records.Curves", "+callbacks.mine.log_evry=1"], ConfigError, "callbacks.mine.log_evry=1: mpframe.training.callbacks.records.Curves takes no such argument; nearest: log_every\n"),
])  # fmt: skip
def test_what_is_none_is_refused(tmp_path: Path, options: Any, error: Any, line: str) -> None:
    """No metric, no callback, or one that would replace a run's own."""
    said = refused(error, train, tmp_path, *SMALL, *options, "trainer.max_steps=1")
    assert line in f"{said}\n"
