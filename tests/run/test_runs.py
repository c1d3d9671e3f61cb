"""Whole runs: every shipped experiment, the curves and files of a run, resume, and the sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from checkout import ROOT
from in_process import StartRun, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tiny_experiments import EXPERIMENTS, tiny

from mpframe import checkpoint
from mpframe.core.errors import CheckpointError, DivergedError
from mpframe.tracking.summary import Summary

MODES = ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"]


def test_there_are_experiments() -> None:
    assert EXPERIMENTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_shipped_experiment_runs_two_steps(
    experiment: str, start_run: StartRun, tiny_data: Path, tmp_path: Path
) -> None:
    few = ["trainer.max_steps=2", "trainer.eval_every=1000", "dataset.batch_size=8"]
    summary = start_run(tmp_path, *few, *tiny(experiment, tiny_data))
    assert (summary.status, summary.steps) == ("finished", 2)


def test_the_first_command_reaches_97_percent(tmp_path: Path) -> None:
    """In a Python of its own."""
    done = subprocess.run(
        [sys.executable, programs.SCRIPT,
         "dtype=mixed", "loss_scaling=Backoff", "callbacks.progress_bar.shown=on"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/*/summary.json"))
    summary = Summary.read(folder)
    assert summary.status == "finished"
    assert summary.val_metric is not None
    assert summary.val_metric >= 0.97
    assert summary.test_metric is not None
    assert summary.test_metric >= 0.97
    assert done.stdout.splitlines()[-1].startswith(
        f"finished: test_accuracy {summary.test_metric:.4f} (best weights), "
    )
    assert "step/s" in done.stderr  # the progress bar
    names = {path.name for path in folder.iterdir()}
    assert {".hydra", "config_resolved.yaml", "checkpoints", "train.log", "summary.json"} <= names


def test_the_sweep_of_nine_ends_with_nine_finished_runs(tmp_path: Path) -> None:
    axes = ["dtype=fp32,mixed,amp", "loss_scaling=static,Backoff,LogMax"]
    done = programs.run(
        ["-m", *axes, "trainer.max_steps=3", "callbacks.progress_bar=null"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/*/summary.json")]
    assert [summary["status"] for summary in summaries] == ["finished"] * 9
    assert len({(s["dtype"], s["loss_scaling"]) for s in summaries}) == 9
    assert "9 of 9 jobs finished" in done.stdout
    columns = [hparam_columns(path.parent) for path in tmp_path.glob("runs/*/*/*/summary.json")]
    assert all(own == columns[0] for own in columns)
    assert {name for name, varies in columns[0].items() if varies} == {"dtype", "loss_scaling"}


def hparam_columns(folder: Path) -> dict[str, bool]:
    """The columns of a run in the HParams table, and whether each comes first."""
    data = EventAccumulator(str(folder)).Reload().PluginTagToContent("hparams")
    told = HParamsPluginData.FromString(data["_hparams_/experiment"]).experiment.hparam_infos
    return {info.name: info.differs for info in told}


def test_a_failed_job_does_not_stop_a_sweep(tmp_path: Path) -> None:
    sizes = "dataset.batch_size=5000,64"
    done = programs.run(
        ["-m", sizes, "trainer.max_steps=1", "callbacks.progress_bar=null"], tmp_path
    )
    assert done.returncode == 1
    folders = [path.parent for path in tmp_path.glob("runs/*/*/*/summary.json")]
    statuses = {folder.name: Summary.read(folder).status for folder in folders}
    assert statuses == {"dataset.batch_size=5000": "failed", "dataset.batch_size=64": "finished"}
    assert "dataset.batch_size=5000: the training set has 1437 samples" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scaling", ["LogMax", "none"])
def test_the_curves_of_a_run(start_run: StartRun, tmp_path: Path, scaling: str) -> None:
    start_run(tmp_path, "trainer.epochs=2", "trainer.log_every=1", f"loss_scaling={scaling}")
    curves = scalars(tmp_path)
    every_step = [
        "loss/train", "optim/lr", "grad/norm", "grad/amax", "loss_scale/scale",
        "loss_scale/skipped_total", "speed/samples_per_second", "speed/input_fraction",
        "memory/peak_bytes",
    ]  # fmt: skip
    if scaling == "LogMax":
        every_step += ["loss_scale/log2_mean", "loss_scale/log2_std"]
    for tag in every_step:
        assert [step for step, _ in curves[tag]] == list(range(1, 45)), tag
    for tag in ("loss/val", "metric/accuracy/val"):
        assert [step for step, _ in curves[tag]] == [22, 44], tag
    assert ("loss_scale/log2_mean" in curves) == (scaling == "LogMax")
    # Unscaled: at a scale of 2^16 the loss is still that of ten classes, about ln 10.
    assert 0.0 < curves["loss/train"][0][1] < 10.0


def test_resume_auto_takes_the_newest_checkpoint_of_the_folder(
    start_run: StartRun, tmp_path: Path
) -> None:
    start_run(tmp_path, "dtype=fp32", "trainer.epochs=1")
    summary = start_run(tmp_path, "dtype=fp32", "trainer.epochs=2", "resume=auto")
    assert (summary.steps, summary.epochs) == (44, 2)
    steps = [step for step, _ in scalars(tmp_path)["metric/accuracy/val"]]
    assert steps == [22, 44]


@pytest.mark.parametrize("dtype", MODES)
def test_weights_may_come_from_a_run_in_another_mode(
    start_run: StartRun, tmp_path: Path, dtype: str
) -> None:
    source = start_run(tmp_path / "source", "dtype=mixed", "trainer.epochs=3")
    taken = start_run(
        tmp_path / "taken", f"dtype={dtype}", f"init_from={tmp_path / 'source'}",
        "trainer.max_steps=1", "optimizer.lr=1e-9",
    )  # fmt: skip
    assert taken.val_loss == pytest.approx(source.val_loss, rel=0.02)


def test_a_head_may_differ_from_the_weights_that_are_taken(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, small = tmp_path / "source", ["model.width=8", "trainer.max_steps=1"]
    start_run(source, *small, "dtype=fp32")
    other = [*small, f"init_from={source}", "model.classes=12"]
    with pytest.raises(CheckpointError, match=r"init_from_except=\[head\.\*\]$"):
        start_run(tmp_path / "refused", *other)
    caplog.set_level("INFO")
    start_run(tmp_path / "taken", *other, "init_from_except=[head.*]")
    assert f"weights taken from {source}, except head.*: 6 parameters are rounded to float16" in (
        caplog.messages
    )


def test_a_run_that_only_skips_ends_as_diverged(start_run: StartRun, tmp_path: Path) -> None:
    """A scale beyond any gradient's reach: static scaling cannot give way."""
    with pytest.raises(DivergedError, match="too high, and the scaler does not go lower; see "):
        start_run(
            tmp_path, "loss_scaling=static", "loss_scaling.scale=1e30",
            "trainer.max_consecutive_skips=5",
        )  # fmt: skip
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps, summary.skipped_steps) == ("diverged", 0, 5)
    assert not checkpoint.all_in(tmp_path)
    assert [step for step, _ in scalars(tmp_path)["grad/amax"]] == [1, 2, 3, 4, 5]


def test_a_rung_without_masters_says_what_it_costs(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path, "dtype=mixed_bf16", "dtype.master_weights=false", "trainer.max_steps=1")
    assert any("dtype.master_weights=false: " in message for message in caplog.messages)


def test_weights_at_the_end_of_their_range_are_warned_about(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A learning rate that throws the weights beyond 65504 in its first steps."""
    with pytest.raises(DivergedError, match="steps were skipped"):
        start_run(
            tmp_path, "optimizer=sgd", "optimizer.lr=1e9", "scheduler=none", "trainer.epochs=1",
            "trainer.max_steps=3", "trainer.max_consecutive_skips=100",
        )  # fmt: skip
    assert any("lie beyond the half range" in line for line in caplog.messages)
