"""The test at the end of a run: its best weights on data that chose nothing, and nothing moves."""

import csv
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import StartRun, scalars, train
from sameness import differing

from mpframe import checkpoint
from mpframe.checkpoint.folder import best_in
from mpframe.cli.commands.evaluate import evaluate
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    RunInterrupted,
)
from mpframe.run.parts import build_loaders, build_task
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer

# The learning rate is too high on purpose: the last weights are not the best ones.
OPTIONS = [
    "model.width=8", "dtype=mixed", "trainer.ema_decay=0.5", "trainer.epochs=1",
    "trainer.max_steps=6", "trainer.eval_every=2", "scheduler=none", "optimizer.lr=0.3",
    "trainer.log_every=4", "dataset.batch_size=128", "seed=3",
]  # fmt: skip


MLP = [*OPTIONS[1:], "model=mlp", "model.hidden=8"]


def run_of(folder: Path, *options: str) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    _, composed = compose_named(["callbacks.progress_bar=null", *options])
    own = without_hydra(composed)
    return Run(check_config(own), own, folder)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run whose best checkpoint is not its last, made once; and what it was made by."""
    folder = tmp_path_factory.mktemp("tested")
    run = run_of(folder, *OPTIONS)
    run.train()
    return folder, run


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def best_of(folder: Path) -> Path:
    (best,) = best_in(folder, 1)
    return best


def test_the_best_weights_are_tested_and_evaluate_says_the_same(tested: tuple[Path, Run]) -> None:
    folder, _ = tested
    summary, best, last = Summary.read(folder), best_of(folder), checkpoint.newest(folder)
    assert best != last
    assert summary.tested == "best"
    for path, split in ((folder, None), (best, "test")):
        done = evaluate(path, [], split=split)
        assert (done.split, done.samples, done.weights) == ("test", 180, "ema")
        assert done.evaluation.loss == summary.test_loss
        assert done.evaluation.metrics == summary.test_metrics
    assert evaluate(last, [], split="test").evaluation.loss != summary.test_loss


def test_the_trainer_holds_its_last_state_bit_for_bit(tested: tuple[Path, Run]) -> None:
    folder, run = tested
    assert run.trainer is not None
    saved = checkpoint.load(folder)["trainer"]
    assert not differing(saved, run.trainer.state_dict())
    assert saved["ema_updates"] == 6
    for name, parameter in run.trainer.model.named_parameters():
        assert parameter.equal(saved["weights"][name].to(parameter.dtype)), name


def test_what_a_model_keeps_beside_its_weights_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """A memory that grows, and one that is not persistent: the best has less of both."""
    model = "model._target_=noisy.Remembering"
    run = run_of(tmp_path, *OPTIONS[1:], model, "dtype=fp32")
    run.train()
    summary, best = Summary.read(tmp_path), best_of(tmp_path)
    assert best != checkpoint.newest(tmp_path)
    assert evaluate(best, [model], split="test").evaluation.loss == summary.test_loss
    assert evaluate(tmp_path, [model], split="val").evaluation.loss == summary.val_loss
    assert run.trainer is not None
    saved = checkpoint.load(tmp_path)["trainer"]
    assert not differing(saved, run.trainer.state_dict())
    assert set(saved["extra_state"]) == {"means", "sum", "count"}


def test_the_test_is_told_everywhere(tested: tuple[Path, Run]) -> None:
    folder, _ = tested
    summary = Summary.read(folder)
    stored = json.loads((folder / "summary.json").read_text())
    assert stored["test_accuracy"] == summary.test_metric
    assert stored["tested"] == "best"
    curves = scalars(folder)
    numbers = {"loss/test": summary.test_loss, "metric/accuracy/test": summary.test_metric}
    for tag, value in numbers.items():
        # The event file keeps 32 bits of each number.
        assert curves[tag] == [(6, pytest.approx(value, rel=2.0**-24))]
    rows = table(folder)
    *_, validated, last = rows
    assert (validated["val_loss"] != "", validated["test_loss"]) == (True, "")
    # metrics.csv keeps nine digits.
    assert float(last["test_accuracy"]) == pytest.approx(summary.test_metric, rel=1e-8)
    filled = {name for name, cell in last.items() if cell}
    assert filled == {"step", "epoch", "test_loss", "test_accuracy"}
    assert sum(row["test_loss"] != "" for row in rows) == 1


# Best weights that are gone

LOST = (
    "warning: trainer.keep_best=1: the best validation, accuracy {} (step {}), has no checkpoint "
    "in this folder; it could not be written or was deleted, so the last weights are tested"
)


def validated_with(monkeypatch: pytest.MonkeyPatch, accuracies: dict[int, float]) -> None:
    """Let the validation of each step have this accuracy."""
    evaluate = Trainer.evaluate

    def planned(trainer: Trainer, loader: Any, split: str = "validation") -> Evaluation:
        done = evaluate(trainer, loader, split)
        if split == "test":
            return done
        return replace(
            done, metrics={"accuracy": accuracies.get(trainer.progress.global_step, 0.25)}
        )

    monkeypatch.setattr(Trainer, "evaluate", planned)


def test_best_weights_that_are_gone_are_not_said_to_be_tested(
    start_run: StartRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others are left, which would be taken for the best ones."""
    written = checkpoint.save

    def save(folder: Path, snapshot: checkpoint.Snapshot) -> Path:
        if snapshot.global_step == 4:
            raise CheckpointError("checkpoint could not be written (No space left on device)")
        return written(folder, snapshot)

    monkeypatch.setattr(checkpoint, "save", save)
    validated_with(monkeypatch, {2: 0.5, 4: 0.75, 6: 0.25})
    caplog.set_level("INFO")
    summary = start_run(tmp_path, *MLP, "trainer.on_save_error=warn", "trainer.keep_last=9")
    assert len(checkpoint.all_in(tmp_path)) == 2
    assert (summary.tested, summary.best, summary.best_step) == ("last", 0.75, 4)
    assert summary.searched == 0.25  # A search goes by the weights that were tested.
    assert LOST.format(0.75, 4) in caplog.messages
    assert caplog.messages[-1].startswith(
        f"finished: test_accuracy {summary.test_metric:.4f} (last weights), val_accuracy 0.2500, "
    )
    assert evaluate(tmp_path, []).evaluation.loss == summary.test_loss


def test_best_weights_are_saved_after_a_skipped_step(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the best validation would have no checkpoint."""
    validated_with(monkeypatch, {2: 0.75, 4: 0.5, 6: 0.25})
    # Each second step is skipped.
    options = [*MLP, "loss_scaling=Backoff", "loss_scaling.init_scale=1"]
    options += ["loss_scaling.growth_interval=1", "loss_scaling.growth_factor=1e30"]
    options += ["loss_scaling.max_scale=1e30", "loss_scaling.backoff_factor=1e-30"]
    summary = start_run(tmp_path, *options)
    progress = checkpoint.load(tmp_path / "checkpoints/step_00000002")["trainer"]["progress"]
    assert (progress["steps"], progress["skipped_in_a_row"]) == (1, 1)
    assert (summary.tested, summary.best_step, summary.searched) == ("best", 2, 0.75)


# Runs that are not finished


def test_a_run_interrupted_in_its_test_makes_it_when_resumed(
    tested: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert (stopped.status, stopped.steps) == ("interrupted", 6)
    assert (stopped.test_loss, stopped.test_metrics, stopped.tested) == (None, {}, None)
    assert "loss/test" not in scalars(tmp_path)
    resumed, whole = train(tmp_path, *OPTIONS, "resume=auto"), Summary.read(tested[0])
    assert (resumed.test_loss, resumed.test_metrics) == (whole.test_loss, whole.test_metrics)
    assert scalars(tmp_path)["loss/test"] == scalars(tested[0])["loss/test"]


def test_a_run_that_goes_on_is_tested_anew(tested: tuple[Path, Run], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tested[0], tmp_path / "run"))
    train(folder, *OPTIONS, "resume=auto", "trainer.max_steps=8")
    assert [step for step, _ in scalars(folder)["loss/test"]] == [8]
    rows = table(folder)
    assert [row["step"] for row in rows if row["test_loss"]] == ["8"]


def test_runs_that_trained_nothing_or_diverged_are_not_tested(
    start_run: StartRun, tmp_path: Path
) -> None:
    assert start_run(tmp_path / "none", *MLP, "trainer.max_steps=0").tested is None
    overflowing = ["loss_scaling=static", "loss_scaling.scale=1e30", "callbacks.autopsy=null"]
    with pytest.raises(DivergedError):
        start_run(tmp_path / "run", *MLP, *overflowing, "trainer.max_consecutive_skips=2")
    summary = Summary.read(tmp_path / "run")
    assert (summary.status, summary.test_loss, summary.tested) == ("diverged", None, None)


# Datasets without a test part, and mistakes

FACTS = ["model.in_features=64", "model.classes=10", "trainer.max_steps=2"]  # of no shipped dataset
OWN = """
import torch
from dataclasses import replace
from torch.utils.data import TensorDataset
from mpframe.data import digits
def without():
    return replace(digits(), test=None)
def empty():
    return replace(digits(), test=[])
def nan():
    bad = TensorDataset(torch.full((3, 1, 8, 8), torch.nan), torch.zeros(3).long())
    return replace(digits(), test=bad)
"""


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    return "dataset._target_=own_parts"


def test_a_dataset_without_a_test_part(start_run: StartRun, tmp_path: Path, own_parts: str) -> None:
    own = f"{own_parts}.without"
    summary = start_run(tmp_path / "run", *MLP, own, *FACTS)
    assert (summary.status, summary.test_loss, summary.tested) == ("finished", None, None)
    assert "loss/test" not in scalars(tmp_path / "run")
    done = evaluate(tmp_path / "run", [own])
    assert (done.split, done.evaluation.loss) == ("val", summary.val_loss)
    with pytest.raises(ConfigError) as refused:
        evaluate(tmp_path / "run", [own], split="test")
    assert str(refused.value) == "split=test: the dataset has no test part; use split=val"


def test_an_empty_test_part_is_refused_before_the_first_step(
    tmp_path: Path, own_parts: str
) -> None:
    run = run_of(tmp_path / "run", *MLP, *FACTS, f"{own_parts}.empty")
    task = build_task(run.config)
    with pytest.raises(DataError, match=r"^dataset: list has no samples; give at least one$"):
        build_loaders(run.config, task)


def test_an_error_in_the_test_data_is_placed(
    start_run: StartRun, tmp_path: Path, own_parts: str
) -> None:
    with pytest.raises(DataError, match=r"^after step \d: dataset: test sample 0 holds NaN or inf"):
        start_run(tmp_path / "run", *MLP, *FACTS, f"{own_parts}.nan")
    assert Summary.read(tmp_path / "run").status == "failed"
