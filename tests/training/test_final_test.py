"""The test at the end of a run: its best weights on data that chose nothing, and nothing moves."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch
from in_process import composed, csv_rows, differing, scalars, train
from torch.utils.data import TensorDataset

from mpframe import checkpoint
from mpframe.checkpoint.folder import best_in
from mpframe.cli.commands.evaluate import evaluate
from mpframe.config.command_line import check_config
from mpframe.core.errors import (
    ConfigError,
    DataError,
    DivergedError,
    RunInterrupted,
)
from mpframe.data.images import digits
from mpframe.data.task import Task
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer

# The learning rate is too high on purpose: the last weights are not the best ones.
OPTIONS = ["model.width=8", "dtype=mixed", "trainer.ema_decay=0.5", "trainer.epochs=1"]
OPTIONS += ["trainer.max_steps=6", "trainer.eval_every=2", "scheduler=none", "optimizer.lr=0.3"]
OPTIONS += ["trainer.log_every=4", "dataset.batch_size=128", "seed=3"]
MLP = [*OPTIONS[1:], "model=mlp", "model.hidden=8"]


def trained(folder: Path, *options: str) -> Run:
    own = composed("callbacks.progress_bar=null", *options)
    run = Run(check_config(own), own, folder)
    run.train()
    return run


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run whose best checkpoint is not its last, made once; and the trainer that it had."""
    folder = tmp_path_factory.mktemp("tested")
    return folder, trained(folder, *OPTIONS).trainer


def rows_of_the_test(folder: Path) -> list[dict[str, str]]:
    return [row for row in csv_rows(folder / "metrics.csv") if row["test_loss"]]


def test_the_best_weights_are_tested_and_all_places_say_the_same(tested: tuple[Path, Any]) -> None:
    folder, (row,) = tested[0], rows_of_the_test(tested[0])
    summary, (best,), last = Summary.read(folder), best_in(folder, 1), checkpoint.newest(folder)
    assert best != last
    assert summary.tested == "best"
    for path, split in ((folder, None), (best, "test")):
        done = evaluate(path, [], split=split)
        assert (done.split, done.samples, done.weights) == ("test", 180, "ema")
        assert done.evaluation.loss == summary.test_loss
        assert done.evaluation.metrics == summary.test_metrics
    assert evaluate(last, [], split="test").evaluation.loss != summary.test_loss
    # The event file keeps 32 bits of each number, metrics.csv nine digits.
    curve = [(6, pytest.approx(summary.test_metric, rel=2.0**-24))]
    assert scalars(folder)["metric/accuracy/test"] == curve
    assert float(row["test_accuracy"]) == pytest.approx(summary.test_metric, rel=1e-8)
    filled = {name for name, cell in row.items() if cell}
    assert filled == {"step", "epoch", "test_loss", "test_accuracy"}


def test_the_trainer_holds_its_last_state_bit_for_bit(tested: tuple[Path, Any]) -> None:
    folder, trainer = tested
    saved = checkpoint.load(folder)["trainer"]
    assert not differing(saved, trainer.state_dict())
    assert saved["ema_updates"] == 6
    for name, parameter in trainer.model.named_parameters():
        assert parameter.equal(saved["weights"][name].to(parameter.dtype)), name


def test_what_a_model_keeps_beside_its_weights_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """A memory that grows, and one that is not persistent: the best has less of both."""
    model = "model._target_=own_parts.NoisyNet"
    run = trained(tmp_path, *OPTIONS[1:], model, "dtype=fp32", "optimizer.lr=3")
    summary, (best,) = Summary.read(tmp_path), best_in(tmp_path, 1)
    assert best != checkpoint.newest(tmp_path)
    assert evaluate(best, [model], split="test").evaluation.loss == summary.test_loss
    saved = checkpoint.load(tmp_path)["trainer"]
    assert not differing(saved, run.trainer.state_dict())  # type: ignore[union-attr]
    assert set(saved["extra_state"]) == {"means", "sum", "count"}


def validated_with(monkeypatch: Patch, accuracies: dict[int, float]) -> None:
    evaluate = Trainer.evaluate

    def planned(trainer: Trainer, loader: Any, split: str = "validation") -> Evaluation:
        done, step = evaluate(trainer, loader, split), trainer.progress.global_step
        own = {"accuracy": accuracies.get(step, 0.25)}
        return done if split == "test" else replace(done, metrics=own)

    monkeypatch.setattr(Trainer, "evaluate", planned)


def test_best_weights_gone_are_not_claimed(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    """Others are left, which would be taken for the best ones."""
    written = checkpoint.save

    def save(folder: Path, snapshot: checkpoint.Snapshot) -> Path:
        path = written(folder, snapshot)
        if snapshot.global_step == 4:
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(checkpoint, "save", save)
    validated_with(monkeypatch, {2: 0.5, 4: 0.75, 6: 0.25})
    caplog.set_level("INFO")
    summary = train(tmp_path, *MLP, "trainer.keep_last=9")
    assert (summary.tested, summary.best, summary.best_step) == ("last", 0.75, 4)
    assert summary.searched == 0.25  # A search goes by the weights that were tested.
    assert (
        "warning: trainer.keep_best=1: the best validation, accuracy 0.75 (step 4), has no "
        "checkpoint in this folder, so the last weights are tested"
    ) in caplog.messages
    assert "(last weights), val_accuracy 0.2500, " in caplog.messages[-1]
    assert evaluate(tmp_path, []).evaluation.loss == summary.test_loss


def test_best_weights_are_saved_after_a_skipped_step(tmp_path: Path, monkeypatch: Patch) -> None:
    validated_with(monkeypatch, {2: 0.75, 4: 0.5, 6: 0.25})
    scaler = "init_scale=1 growth_interval=1 growth_factor=1e30 max_scale=1e30 backoff_factor=1e-30"
    skips_each_second_step = [f"loss_scaling.{word}" for word in scaler.split()]
    summary = train(tmp_path, *MLP, "loss_scaling=Backoff", *skips_each_second_step)
    progress = checkpoint.load(tmp_path / "checkpoints/step_00000002")["trainer"]["progress"]
    assert (progress["steps"], progress["skipped_in_a_row"]) == (1, 1)
    assert (summary.tested, summary.best_step, summary.searched) == ("best", 2, 0.75)


def test_a_run_interrupted_in_its_test_makes_it_when_resumed_and_anew_where_it_goes_on(
    tested: tuple[Path, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    made = Trainer.test

    def signalled(trainer: Trainer, loader: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return made(trainer, loader)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", signalled)
        with pytest.raises(RunInterrupted):
            train(tmp_path, *OPTIONS)
    stopped = Summary.read(tmp_path)
    assert (stopped.status, stopped.test_loss, stopped.tested) == ("interrupted", None, None)
    resumed, whole = train(tmp_path, *OPTIONS, "resume=auto"), Summary.read(tested[0])
    assert (resumed.test_loss, resumed.test_metrics) == (whole.test_loss, whole.test_metrics)
    assert scalars(tmp_path)["loss/test"] == scalars(tested[0])["loss/test"]
    train(tmp_path, *OPTIONS, "resume=auto", "trainer.max_steps=8")
    assert [step for step, _ in scalars(tmp_path)["loss/test"]] == [8]
    assert [row["step"] for row in rows_of_the_test(tmp_path)] == ["8"]


def test_runs_that_trained_nothing_or_diverged_are_not_tested(tmp_path: Path) -> None:
    assert train(tmp_path / "none", *MLP, "trainer.max_steps=0").tested is None
    overflowing = ["loss_scaling=static", "loss_scaling.scale=1e30", "callbacks.autopsy=null"]
    with pytest.raises(DivergedError):
        train(tmp_path / "run", *MLP, *overflowing, "trainer.max_consecutive_skips=2")
    summary = Summary.read(tmp_path / "run")
    assert (summary.status, summary.test_loss, summary.tested) == ("diverged", None, None)


def digits_with(test: str = "no") -> Task:
    nan = TensorDataset(torch.full((3, 1, 8, 8), torch.nan), torch.zeros(3).long())
    parts: dict[str, Any] = {"no": None, "an empty": [], "a bad": nan}
    return replace(digits(), test=parts[test])


@pytest.mark.slow
def test_a_dataset_may_lack_a_test_part_but_an_empty_or_bad_one_is_refused(tmp_path: Path) -> None:
    own = "dataset._target_=test_final_test.digits_with"
    options = [*MLP, own, "model.in_features=64", "model.classes=10", "trainer.max_steps=2"]
    summary = train(tmp_path / "run", *options)
    assert (summary.status, summary.test_loss, summary.tested) == ("finished", None, None)
    done = evaluate(tmp_path / "run", [own])
    assert (done.split, done.evaluation.loss) == ("val", summary.val_loss)
    with pytest.raises(ConfigError, match=r"^split=test: the dataset has no test part; use split"):
        evaluate(tmp_path / "run", [own], split="test")
    with pytest.raises(DataError, match=r"^dataset: list has no samples; give at least one$"):
        train(tmp_path / "empty", *options, "dataset.test=an empty")
    with pytest.raises(DataError, match=r"^after step \d: dataset: test sample 0 holds NaN or inf"):
        train(tmp_path / "bad", *options, "dataset.test=a bad")
