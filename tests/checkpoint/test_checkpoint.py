"""Checkpoints: when they are made, which stay, whole or absent; and a disk that fails."""

import os
import re
import resource
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Log, Patch, full, refused
from in_process import differing, scalars, train

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint import folder as folders
from mpframe.checkpoint.folder import best_in, parts_of, prune
from mpframe.checkpoint.parts import put_together
from mpframe.core.errors import CheckpointError, ConfigError, RunInterrupted
from mpframe.tracking import records_in
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import checkpoints
from mpframe.training.callbacks.checkpoints import Checkpoints

WEIGHTS = {"a": torch.arange(5.0)}
STATE = {"weights": WEIGHTS, "steps": 3, "name": "x", "list": [1, None, 2.5]}
FIVE = torch.arange(10.0).view(5, 2)
PLACE = ("trainer", "weights", "w")


def part(start: int, end: int | None = None, at: int | None = None) -> Any:
    """Rows of FIVE as a rank's file has them, perhaps of another place."""
    return (5, 2), (start if at is None else at, 0), FIVE[start:end].clone()


HOSTILE: dict[str, list[Any]] = {
    "its parts do not fit together": [{PLACE: FIVE}],
    "fit together .one holds other": [{PLACE: part(0, 3)}, {}],
    "one holds other tensors": [{PLACE: part(0, 3)}, {PLACE: part(3, at=4)}],
    "something in a divided tensor's place": [{("trainer", "weights"): part(0)}],
}
OPTIONS = ["model=mlp", "model.hidden=32", "trainer.max_steps=10", "trainer.log_every=1"]


def save(folder: Path, step: int, *value: float | None, higher: bool = True, **state: Any) -> Path:
    """A checkpoint; one without a value was never validated."""
    found = {"metric": "m", "value": value[0], "higher_is_better": higher} if value else None
    snapshot = Snapshot(step, state or STATE, "seed: 1\n", {"validation": found})
    return checkpoint.save(folder, snapshot)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_snapshot_comes_back_the_one_of_its_step_is_replaced_and_numbers_tell_the_newest(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3, name="old")
    snapshot = checkpoint.read(save(tmp_path, 3, 0.5))
    assert torch.equal(snapshot.state.pop("weights")["a"], WEIGHTS["a"])
    assert snapshot.state == {k: v for k, v in STATE.items() if k != "weights"}
    assert (snapshot.global_step, snapshot.config) == (3, "seed: 1\n")
    assert snapshot.facts["validation"]["value"] == 0.5
    assert names(tmp_path) == ["step_00000003"]
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_best=0)
    assert names(tmp_path) == ["step_100000000", "step_99999999"]


def test_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    cases: list[Any] = [
        ((0.1, 0.9, 0.8, 0.2, 0.5), True, 2, [2, 3]),
        ((0.1, 0.9, 0.8, 0.2, 0.5), False, 2, [1, 4]),
        ((0.5, 0.9, 0.9, 0.1), True, 1, [2]),  # Of two equal ones the older.
        ((None, 0.1, None), True, 3, [2]),  # What is nan is none of them.
    ]
    for number, (values, higher, count, best) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        for step, value in enumerate(values, start=1):
            save(folder, step, value, higher=higher)
        save(folder, 9)  # was never validated
        assert sorted(path.name for path in best_in(folder, count)) == places(best)
        # Another has to beat the last of them, if they are enough.
        last = values[best[-1] - 1] * (1 if higher else -1)
        beaten = [folders.rank_to_beat(folder, n) for n in (len(best), len(values) + 1)]
        assert beaten == [-last, float("inf")]
        prune(folder, keep_last=1, keep_best=count)
        assert names(folder) == places([*best, 9])


def places(steps: list[int]) -> list[str]:
    return [f"step_{step:08d}" for step in steps]


def test_newer_ones_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    moved = folders.set_aside_after(tmp_path, 1)
    assert [path.name for path in moved] == [f"{name}.set_aside" for name in places([2, 3])]
    assert [path.name for path in checkpoint.all_in(tmp_path)] == places([1])
    save(tmp_path, 2)
    folders.set_aside_after(tmp_path, 1)
    assert checkpoint.load(moved[0])["steps"] == 3


def test_a_checkpoint_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: Patch) -> None:
    """After a power cut there is nothing under the name, or all of it and of the run's curves."""
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        calls.append(f"{self.name} -> {renamed.name}")
        return renamed

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    (tmp_path / "numerics").mkdir()
    curves = "events.out.tfevents.1", "metrics.csv", "log2_amax.txt", "numerics/products.csv"
    for name in (*curves, "other"):
        (tmp_path / name).touch()
    checkpoint.save(tmp_path, Snapshot(1, STATE, "", {"records": records_in(tmp_path)}))
    new = ".step_00000001.new"
    files = ["state.pt", "config.yaml", "manifest.json"]
    records = {"events.out.tfevents.1", "log2_amax.txt", "metrics.csv", "products.csv"}
    assert calls[:4] == [*files, new]
    assert {*calls[4:-2]} == records | {tmp_path.name, "numerics"}
    assert calls[-2:] == [f"{new} -> step_00000001", "checkpoints"]


def test_what_a_kill_leaves_behind_is_tidied(tmp_path: Path) -> None:
    """Half-written, half-deleted, and killed between the two renames of a replacement."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    parent = tmp_path / "checkpoints"
    (parent / "step_00000001").rename(parent / ".step_00000001.dropped")
    shutil.copytree(parent / "step_00000002", parent / ".step_00000002.new")
    shutil.copytree(parent / "step_00000002", parent / ".step_00000002.replaced")
    (parent / "step_00000003").rename(parent / ".step_00000003.replaced")
    folders.tidy(tmp_path)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_a_save_that_fails_leaves_the_older_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"state\.pt: holds numpy\S+, and loading it would"):
        save(tmp_path, 2, value=np.float64(1.0))
    for fails in ("torch.save", "mpframe.checkpoint.saving.sync_paths"):
        with monkeypatch.context() as patched:
            patched.setattr(fails, full)
            with pytest.raises(CheckpointError, match=r"could not be written \(No space left on"):
                save(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    with pytest.raises(CheckpointError, match=r"could not be written \(File too large\)"):
        save(tmp_path, 2, large=torch.zeros(2**16))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == places([1])
    assert checkpoint.load(tmp_path)["steps"] == 3


def put(folder: Path, ranks: list[Any]) -> Any:
    """The state that these parts make whole."""
    own = {"trainer": {"weights": {"w": None, "tied": None}, "optimizer": {0: {"m": None}}}}
    paths = [folder / parts_of(rank) for rank in range(len(ranks))]
    for path, parts in zip(paths, ranks, strict=True):
        torch.save(parts, path)
    put_together(own, paths)
    return own["trainer"]


def test_the_parts_of_all_ranks_are_the_tensor_or_refused(tmp_path: Path) -> None:
    """An empty one, too; what several names share is one tensor."""
    other, moment = ("trainer", "weights", "tied"), ("trainer", "optimizer", 0, "m")
    pieces = [part(0, 3), part(3), part(5)]
    moments = [(*where, rows + 1) for *where, rows in pieces]
    ranks = [{PLACE: a, other: a, moment: b} for a, b in zip(pieces, moments, strict=True)]
    own = put(tmp_path, ranks)
    assert torch.equal(own["weights"]["w"], FIVE)
    assert own["weights"]["tied"] is own["weights"]["w"]
    assert torch.equal(own["optimizer"][0]["m"], FIVE + 1)
    for said, hostile in HOSTILE.items():
        line = refused(CheckpointError, put, tmp_path, hostile)
        assert re.search(said, line)
        assert line.startswith(str(tmp_path))


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.all_in(folder)]


def test_saved_by_the_clock(tmp_path: Path, monkeypatch: Patch) -> None:
    """A clock that moves on by ten seconds each step. The last step is saved whatever was due."""
    ticks = iter(range(0, 100_000, 10))
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    train(tmp_path, *OPTIONS, "trainer.checkpoint_every=0.5min", "trainer.keep_last=9")
    assert steps(tmp_path) == [3, 6, 9, 10]
    assert "metrics.csv" in checkpoint.read(tmp_path).facts["records"]


@pytest.mark.parametrize(("newest", "best"), [(1, 2), (0, 2), (0, 0)])
def test_the_best_are_saved_when_made_and_kept(tmp_path: Path, newest: int, best: int) -> None:
    """Beside the newest, of which a run may keep none."""
    options = [f"trainer.keep_last={newest}", f"trainer.keep_best={best}", "trainer.eval_every=2"]
    summary = train(tmp_path, *OPTIONS, *options, "trainer.checkpoint_every=5", "optimizer.lr=0.03")
    assert (summary.status, summary.steps) == ("finished", 10)
    curve = scalars(tmp_path)["metric/accuracy/val"]
    found = [step for step, _ in sorted(curve, key=lambda p: (-p[1], p[0]))[:best]]
    assert {*found, *[10] * newest} == set(steps(tmp_path))
    assert [path.name for path in best_in(tmp_path, 2)] == places(found)


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


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_hides_no_error(
    background: bool, tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    """At the next save at the latest, and not the error of that one."""
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(Summary, "write", full)
    said = r"^checkpoint \S+step_00000002 could not be written \(No space left on device\)"
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path, *OPTIONS, "trainer.checkpoint_every=2", f"trainer.async_save={background}")
    (line,) = (line for line in caplog.messages if "cannot be written (No space left" in line)
    assert line.startswith("warning: ")
    assert [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")] == []


def test_a_run_that_saves_nothing_says_so_if_stopped(tmp_path: Path, monkeypatch: Patch) -> None:
    kill = partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(Checkpoints, "on_optimizer_step", lambda *_: kill())
    said = r"^stopped by SIGTERM; trainer\.keep_last=0: where it stopped is not saved$"
    with pytest.raises(RunInterrupted, match=said):
        train(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.eval_every=3")
    assert checkpoint.all_in(tmp_path) == []
    said = r"^trainer\.requeue=true: needs resume=auto, .* and trainer\.keep_last >= 1, so that "
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.requeue=true", "resume=auto")
