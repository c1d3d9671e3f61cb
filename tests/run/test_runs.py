"""Whole runs: every shipped experiment, the first command, and the memory of their process."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import processes
import pytest
from checkout import ROOT
from fixtures import Patch
from in_process import composed, train
from tiny_data import EXPERIMENTS, tiny

from mpframe.config.command_line import check_config
from mpframe.run import process
from mpframe.tracking.summary import Summary
from mpframe.training import memory

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


def test_a_run_on_cpu_keeps_freed_memory(monkeypatch: Patch) -> None:
    """Where glibc can. Nonsense is refused, with its reason, by the run."""
    library = Mock(**{"mallopt.return_value": 1})
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not memory.keep_freed_memory()
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    for options in ("cuda:7", "nonsense", "cpu trainer.parallel=fsdp", "cpu"):
        assert not library.mallopt.mock_calls
        process.prepare_process(check_config(composed(*f"device={options}".split())))
    told = [call.args for call in library.mallopt.mock_calls]
    assert told == [(-1, -1), (-4, 0)]  # M_TRIM_THRESHOLD never, M_MMAP_MAX none
