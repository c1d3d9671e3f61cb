"""Checkpoints: whole or absent, verified, ranked, pruned by number."""

import os
import random
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.folder import best_in, prune, rank_to_beat, set_aside_after, tidy
from mpframe.checkpoint.saving import Background
from mpframe.core.errors import CheckpointError

STATE = {"weights": {"a": torch.arange(5.0)}, "steps": 3, "name": "x", "list": [1, None, 2.5]}


def save(folder: Path, global_step: int, accuracy: float | None = None, **state: Any) -> Path:
    facts = {
        "validation": {"metric": "accuracy", "value": accuracy, "higher_is_better": True}
        if accuracy is not None
        else None
    }
    return checkpoint.save(folder, Snapshot(global_step, state or STATE, "seed: 1\n", facts))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, 3, 0.5)
    snapshot = checkpoint.read(path)
    assert torch.equal(snapshot.state["weights"]["a"], STATE["weights"]["a"])  # type: ignore[index]
    assert {k: v for k, v in snapshot.state.items() if k != "weights"} == {
        k: v for k, v in STATE.items() if k != "weights"
    }
    assert (snapshot.global_step, snapshot.config) == (3, "seed: 1\n")
    assert snapshot.facts["validation"]["value"] == 0.5
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, name="old")
    save(tmp_path, 1, name="new")
    assert checkpoint.load(tmp_path) == {"name": "new"}
    assert names(tmp_path) == ["step_00000001"]


def test_the_newest_stay_by_number_not_by_name(tmp_path: Path) -> None:
    for global_step in (9, 10, 99_999_999, 100_000_000):
        save(tmp_path, global_step)
    prune(tmp_path, keep_last=2, keep_best=0)
    assert names(tmp_path) == ["step_100000000", "step_99999999"]


@pytest.mark.parametrize(("higher", "kept"), [(True, [2, 3, 5]), (False, [1, 4, 5])])
def test_the_best_stay_besides_the_newest(tmp_path: Path, higher: bool, kept: list[int]) -> None:
    for global_step, value in enumerate((0.1, 0.9, 0.8, 0.2, 0.5), start=1):
        facts = {"validation": {"metric": "m", "value": value, "higher_is_better": higher}}
        checkpoint.save(tmp_path, Snapshot(global_step, STATE, facts=facts))
    prune(tmp_path, keep_last=1, keep_best=2)
    assert names(tmp_path) == [f"step_{n:08d}" for n in kept]


def test_of_two_equal_ones_the_older_is_the_best(tmp_path: Path) -> None:
    for global_step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9)):
        save(tmp_path, global_step, accuracy)
    assert [path.name for path in best_in(tmp_path, 1)] == ["step_00000002"]


def test_what_was_never_validated_or_is_nan_is_no_best(tmp_path: Path) -> None:
    facts = {"validation": {"metric": "m", "value": None, "higher_is_better": True}}
    checkpoint.save(tmp_path, Snapshot(1, STATE, facts=facts))
    save(tmp_path, 2)
    save(tmp_path, 3, 0.1)
    assert [path.name for path in best_in(tmp_path, 3)] == ["step_00000003"]
    assert rank_to_beat(tmp_path, 1) == -0.1
    assert rank_to_beat(tmp_path, 2) == float("inf")


def test_newer_ones_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    for global_step in (1, 2, 3):
        save(tmp_path, global_step)
    moved = set_aside_after(tmp_path, 1)
    assert [path.name for path in moved] == ["step_00000002.set_aside", "step_00000003.set_aside"]
    assert [path.name for path in checkpoint.all_in(tmp_path)] == ["step_00000001"]
    save(tmp_path, 2)
    set_aside_after(tmp_path, 1)
    assert checkpoint.load(moved[0])["steps"] == 3


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """After a power cut there is nothing under the name, or all of it."""
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
    save(tmp_path, 1)
    new = ".step_00000001.new"
    files = ["state.pt", "config.yaml", "manifest.json"]
    assert calls == [*files, new, f"{new} -> step_00000001", "checkpoints"]


def test_what_a_kill_leaves_behind_is_tidied(tmp_path: Path) -> None:
    """Half-written, half-deleted, and killed between the two renames of a replacement."""
    for global_step in (1, 2, 3):
        save(tmp_path, global_step)
    parent = tmp_path / "checkpoints"
    (parent / "step_00000001").rename(parent / ".step_00000001.dropped")
    shutil.copytree(parent / "step_00000002", parent / ".step_00000002.new")
    shutil.copytree(parent / "step_00000002", parent / ".step_00000002.replaced")
    (parent / "step_00000003").rename(parent / ".step_00000003.replaced")
    tidy(tmp_path)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_a_failed_write_leaves_the_older_ones_and_nothing_else(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"could not be written \(No space left on device\)"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001"]
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"the state holds numpy\S+, and loading it would run"
    ):
        save(tmp_path, 2, value=np.float64(1.0))
    assert names(tmp_path) == ["step_00000001"]


def test_the_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.normal())]

    draw()
    path = save(tmp_path, 1, rng=checkpoint.rng_state())
    expected = [draw() for _ in range(3)]
    checkpoint.restore_rng(checkpoint.load(path)["rng"])
    assert [draw() for _ in range(3)] == expected


def test_a_detached_snapshot_does_not_follow_the_run() -> None:
    weight = torch.arange(6.0).reshape(2, 3).t()
    counts = {"step": [1]}
    state = {"a": weight, "tied": weight, "counts": counts, "pair": (weight[0], 1)}
    taken = Snapshot(1, state).to_cpu().state
    expected = weight.clone()
    weight.zero_()
    counts["step"][0] = 2
    assert torch.equal(taken["a"], expected)
    assert torch.equal(taken["pair"][0], expected[0])
    assert taken["a"] is taken["tied"]
    assert taken["counts"] == {"step": [1]}


def test_a_background_does_one_thing_at_a_time_and_raises_what_failed() -> None:
    seen: list[str] = []

    def fail() -> None:
        raise OSError("full")

    with closing(Background()) as background:
        background.start(lambda: seen.append("first"))
        background.start(lambda: seen.append("second"))
        background.wait()
        assert seen == ["first", "second"]
        background.start(fail)
        with pytest.raises(OSError, match="full"):
            background.start(lambda: seen.append("third"))
        assert seen == ["first", "second"]
    background = Background()
    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")] == []
