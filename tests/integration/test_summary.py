"""What a run says of itself when it ends: times that add up, and whether it trained at all."""

from pathlib import Path

from conftest import StartRun

from mpframe import checkpoint

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32"]


def test_times_and_counts_add_up_over_resumes(start_run: StartRun, tmp_path: Path) -> None:
    first = start_run(tmp_path, *SMALL, "trainer.epochs=1")
    second = start_run(tmp_path, *SMALL, "trainer.epochs=2", "resume=auto")
    assert (first.samples, second.samples) == (22 * 64, 44 * 64)
    assert first.train_seconds is not None
    assert second.train_seconds is not None
    assert second.seconds > first.seconds
    assert first.train_seconds < second.train_seconds < second.seconds
    assert second.samples_per_second == second.samples / second.train_seconds
    assert second.median_step_seconds is not None


def test_a_finished_job_that_is_started_again_keeps_its_time(
    start_run: StartRun, tmp_path: Path
) -> None:
    first = start_run(tmp_path, *SMALL, "trainer.epochs=3")
    saved = checkpoint.read(checkpoint.all_in(tmp_path)[-1])
    again = start_run(tmp_path, *SMALL, "trainer.epochs=3", "resume=auto")
    # The time up to the last checkpoint: what came behind it is the writing of the end.
    assert again.seconds == saved.state["callbacks"]["Throughput"]["seconds"]
    assert again.train_seconds == first.train_seconds
    assert again.samples_per_second == first.samples_per_second


def test_a_partial_window_counts_what_it_had(start_run: StartRun, tmp_path: Path) -> None:
    done = start_run(tmp_path, *SMALL, "trainer.epochs=1", "trainer.accumulate=4")
    assert (done.steps, done.samples) == (6, 22 * 64)


NAN_LOSS = """
import torch
from mpframe.data.digits import digits as load
from mpframe.data.task import Task
from dataclasses import replace

calls = 0

def nan_from(first):
    def loss(outputs, targets):
        global calls
        calls += torch.is_grad_enabled()
        value = torch.nn.functional.cross_entropy(outputs, targets)
        return value * float("nan") if torch.is_grad_enabled() and calls > first else value
    return loss
"""

HIGH = ["dtype=mixed", "loss_scaling=static", "loss_scaling.scale=1073741824"]


def test_a_run_that_applied_no_step_is_diverged(start_run: StartRun, tmp_path: Path) -> None:
    """Two epochs are fewer steps than the guard against endless skips waits for."""
    with pytest.raises(DivergedError) as error:
        start_run(tmp_path, "model=mlp", *HIGH, "trainer.epochs=2", "trainer.autopsy=off")
    assert re.fullmatch(
        r"no step was applied, 44 were skipped: the loss is finite and its gradients overflow at "
        r"scale 1\.07374e\+09: lower loss_scaling\.min_scale or pin the overflowing module to "
        r"fp32 in ops\.modules",
        str(error.value),
    )
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps, summary.skipped_steps) == ("diverged", 0, 44)
    assert summary.reason == str(error.value)
    assert not checkpoint.all_in(tmp_path)
