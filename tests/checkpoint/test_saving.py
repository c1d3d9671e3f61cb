"""When checkpoints are made and which stay; and what a disk that fails does to a run."""

import errno
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, Patch
from in_process import differing, scalars, train

from mpframe import checkpoint
from mpframe.checkpoint import saving
from mpframe.checkpoint.folder import best_in
from mpframe.core.errors import CheckpointError, ConfigError, MpframeError, RunInterrupted
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import checkpoints
from mpframe.training.callbacks.checkpoints import Checkpoints

OPTIONS = ["model=mlp", "model.hidden=32", "trainer.epochs=1", "trainer.max_steps=10"]
OPTIONS += ["trainer.log_every=1"]


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.all_in(folder)]


def test_saved_by_the_clock(tmp_path: Path, monkeypatch: Patch) -> None:
    """A clock that moves on by ten seconds each step. The last step is saved whatever was due."""
    ticks = iter(range(0, 100_000, 10))
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    train(tmp_path, *OPTIONS, "trainer.checkpoint_every=0.5min", "trainer.keep_last=9")
    assert steps(tmp_path) == [3, 6, 9, 10]


def test_the_best_are_saved_when_made_and_kept(tmp_path: Path) -> None:
    options = ["trainer.eval_every=1", "trainer.checkpoint_every=5", "trainer.keep_last=1"]
    train(tmp_path, *OPTIONS, *options, "trainer.keep_best=2", "optimizer.lr=0.03")
    curve = scalars(tmp_path)["metric/accuracy/val"]
    best = sorted(curve, key=lambda point: (-point[1], point[0]))[:2]
    assert {step for step, _ in best} | {10} == set(steps(tmp_path))
    assert [path.name for path in best_in(tmp_path, 2)] == [f"step_{step:08d}" for step, _ in best]


def test_of_a_metric_that_does_not_say_which_is_better_the_loss_decides(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.delattr("mpframe.data.metrics.Accuracy.higher_is_better")
    train(tmp_path, *OPTIONS, "trainer.eval_every=2", "optimizer.lr=0.03")
    curve = scalars(tmp_path)["loss/val"]
    best, _ = min(curve, key=lambda point: (point[1], point[0]))
    assert [path.name for path in best_in(tmp_path, 1)] == [f"step_{best:08d}"]
    said = "metric accuracy does not say which value is better, so the best is the one with the lo"
    assert [f"warning: trainer.keep_best=1: {said}" in line for line in caplog.messages] == [True]


def test_a_save_in_the_background_holds_its_own_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """Written slowly, while the weights move on: each is what the run was at its step."""
    options = [*OPTIONS, "trainer.checkpoint_every=3", "trainer.keep_last=99"]
    train(tmp_path / "whole", *options)
    save = checkpoint.save

    def slowly(*arguments: Any) -> Path:
        time.sleep(0.05)
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", slowly)
    train(tmp_path / "background", *options, "trainer.async_save=true")
    assert steps(tmp_path / "background") == [3, 6, 9, 10]
    whole, background = (checkpoint.all_in(tmp_path / name) for name in ("whole", "background"))
    for first, second in zip(whole, background, strict=True):
        assert differing(checkpoint.load(first), checkpoint.load(second)) == []


def test_a_full_disk_is_one_line_and_does_not_hide_what_went_wrong(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(Summary, "write", full)
    with pytest.raises(
        MpframeError, match=r"^checkpoint \S+ .*written \(No space left on device\)"
    ):
        train(tmp_path, *OPTIONS)
    (line,) = (line for line in caplog.messages if "cannot be written (No space left" in line)
    assert line.startswith("warning: ")


def test_a_full_disk_may_be_warned_of_while_the_best_are_saved(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Before a best one is ranked the save under way ends, whose error must not end the run."""

    def fail(*_: object) -> None:
        raise CheckpointError("checkpoint could not be written (No space left on device)")

    monkeypatch.setattr(checkpoint, "save", fail)
    options = [*OPTIONS, "trainer.on_save_error=warn", "trainer.async_save=true"]
    assert train(tmp_path, *options, "trainer.eval_every=1").steps == 10


@pytest.mark.parametrize(("best", "kept"), [(0, 0), (2, 2)])
def test_a_run_that_keeps_none_of_the_newest(tmp_path: Path, best: int, kept: int) -> None:
    options = ["trainer.keep_last=0", f"trainer.keep_best={best}", "trainer.eval_every=1"]
    summary = train(tmp_path, *OPTIONS, *options, "trainer.checkpoint_every=2")
    assert (summary.status, summary.steps) == ("finished", 10)
    assert checkpoint.all_in(tmp_path) == sorted(best_in(tmp_path, 2))
    assert len(checkpoint.all_in(tmp_path)) == kept


def test_a_run_that_saves_nothing_says_so_if_it_is_stopped(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    kill = partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(Checkpoints, "on_optimizer_step", lambda *_: kill())
    said = r"^stopped by SIGTERM; trainer\.keep_last=0: where it stopped is not saved$"
    with pytest.raises(RunInterrupted, match=said):
        train(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.eval_every=3")
    assert checkpoint.all_in(tmp_path) == []
    said = r"^trainer\.keep_last=0: trainer\.requeue=true needs checkpoints; use 1$"
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.requeue=true", "resume=auto")


RECORDS = {"metrics.csv", "log2_amax.txt", "numerics/ranges.bin", "numerics/products.csv"}
WATCHED = [
    *OPTIONS, "model.depth=1", "dtype=mixed_bf16", "dtype.products=fp8_tensorwise", "numerics=on",
    "numerics.every=4", "trainer.checkpoint_every=4", "trainer.max_steps=5",
]  # fmt: skip


def test_curves_are_on_the_disk_before_a_checkpoint_counts(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A power cut keeps what was synced. Of each file, the bytes at its last fsync."""
    synced: dict[str, int] = {}
    made = []
    sync, put_in_place = os.fsync, saving._put_in_place

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[str(path)] = path.stat().st_size

    def place(new: Path, final: Path) -> None:
        made.append((final.name, dict(synced)))
        put_in_place(new, final)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(saving, "_put_in_place", place)
    train(tmp_path, *WATCHED, "trainer.async_save=true", "trainer.keep_last=9")
    assert [name for name, _ in made] == ["step_00000004", "step_00000005"]
    for name, on_disk in made:
        sizes = checkpoint.read(tmp_path / "checkpoints" / name).facts["records"]
        (events,) = sizes.keys() - RECORDS
        assert events.startswith("events")
        for record, size in sizes.items():
            assert on_disk[str(tmp_path / record)] >= size > 0, (name, record)


def test_a_record_that_cannot_be_synced_stops_the_run_and_leaves_the_older_checkpoints(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def fail(paths: object) -> None:
        if checkpoint.all_in(tmp_path):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saving, "sync_paths", fail)
    said = r"^checkpoint \S+ could not be written \(Input/output error\); older checkpoints are"
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path, *OPTIONS, "trainer.checkpoint_every=2")
    assert steps(tmp_path) == [2]
    assert Summary.read(tmp_path).status == "failed"


def test_a_resume_says_once_which_curves_have_lost_rows(tmp_path: Path, caplog: Log) -> None:
    train(tmp_path, *OPTIONS, "trainer.max_steps=3")
    train(tmp_path, *OPTIONS, "resume=auto", "trainer.max_steps=3")
    assert [line for line in caplog.messages if "shorter" in line] == []
    sizes = checkpoint.read(tmp_path).facts["records"]
    left = {name: 0 if name == "metrics.csv" else size - 9 for name, size in sizes.items()}
    for name, size in left.items():
        os.truncate(tmp_path / name, size)
    for more in (4, 5):
        train(tmp_path, *OPTIONS, "resume=auto", f"trainer.max_steps={more}")
    said = ", ".join(f"{name} ({left[name]} of {size} bytes)" for name, size in sizes.items())
    assert [line for line in caplog.messages if "shorter" in line] == [
        f"warning: shorter than when step_00000003 was made: {said}; what was lost stays missing "
        "from the curves"
    ]
