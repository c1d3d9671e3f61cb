"""Whole runs: every shipped experiment, the first command, curves."""

import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from checkout import ROOT
from in_process import scalars, train
from tiny_data import EXPERIMENTS, tiny

from mpframe.tracking.summary import Summary

# Images from files, two losses, text, boxes; the others are of one of these kinds.
ALWAYS = ("fashion_mnist_cnn", "digits_gan", "gpt_small", "detection_ssd_small")
SMALLEST = [
    pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow])
    for name in EXPERIMENTS
    if f"{name}_small" not in EXPERIMENTS
]


@pytest.mark.parametrize("experiment", SMALLEST)
def test_each_experiment_runs_two_steps(experiment: str, tiny_data: Path, tmp_path: Path) -> None:
    few = ["trainer.max_steps=2", "trainer.eval_every=1000", "dataset.batch_size=8"]
    summary = train(tmp_path, *few, *tiny(experiment, tiny_data))
    assert (summary.status, summary.steps) == ("finished", 2)


@pytest.mark.slow
def test_the_first_command_reaches_97_percent(tmp_path: Path) -> None:
    """In a Python of its own."""
    words = ["dtype=mixed", "loss_scaling=Backoff", "callbacks.progress_bar.shown=on"]
    done = subprocess.run(
        [sys.executable, processes.SCRIPT, *words], capture_output=True, text=True, timeout=300,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/*/summary.json"))
    summary = Summary.read(folder)
    assert summary.status == "finished"
    assert min(summary.val_metric or 0.0, summary.test_metric or 0.0) >= 0.97
    said = f"finished: test_accuracy {summary.test_metric:.4f} (best weights), "
    assert done.stdout.splitlines()[-1].startswith(said)
    assert "step/s" in done.stderr  # the progress bar
    names = {path.name for path in folder.iterdir()}
    assert {".hydra", "config_resolved.yaml", "checkpoints", "train.log", "summary.json"} <= names


def test_the_curves_of_a_run(tmp_path: Path) -> None:
    options = ["model.width=8", "dtype=mixed", "trainer.epochs=1", "loss_scaling=LogMax"]
    summary = train(tmp_path, *options, "trainer.log_every=1")
    curves = scalars(tmp_path)
    every_step = ["loss/train", "optim/lr", "grad/norm", "grad/amax", "loss_scale/scale"]
    every_step += ["loss_scale/skipped_total", "loss_scale/log2_mean", "loss_scale/log2_std"]
    every_step += ["speed/samples_per_second", "speed/input_fraction", "memory/peak_bytes"]
    for tag in every_step:
        assert [step for step, _ in curves[tag]] == list(range(1, 23)), tag
    validations = [*curves["loss/val"], *curves["metric/accuracy/val"]]
    assert [step for step, _ in validations] == [22, 22]
    # Unscaled: at a scale of 2^16 the loss is still that of ten classes, about ln 10.
    assert 0.0 < curves["loss/train"][0][1] < 10.0
    assert (summary.val_metric or 0.0) > 0.5  # It learns.
