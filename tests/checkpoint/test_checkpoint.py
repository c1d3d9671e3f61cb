"""Checkpoints: whole or absent, verified, ranked, pruned by number; the parts that ranks wrote."""

import os
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, full

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint import folder as folders
from mpframe.checkpoint.folder import best_in, parts_of, prune
from mpframe.checkpoint.saving import Background
from mpframe.checkpoint.state import put_together
from mpframe.core.errors import CheckpointError

WEIGHTS = {"a": torch.arange(5.0)}
STATE = {"weights": WEIGHTS, "steps": 3, "name": "x", "list": [1, None, 2.5]}


def save(folder: Path, step: int, *value: float | None, higher: bool = True, **state: Any) -> Path:
    """A checkpoint; one without a value was never validated."""
    found = {"metric": "m", "value": value[0], "higher_is_better": higher} if value else None
    snapshot = Snapshot(step, state or STATE, "seed: 1\n", {"validation": found})
    return checkpoint.save(folder, snapshot)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_snapshot_comes_back_and_the_one_of_its_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, name="old")
    snapshot = checkpoint.read(save(tmp_path, 3, 0.5))
    assert torch.equal(snapshot.state.pop("weights")["a"], WEIGHTS["a"])
    assert snapshot.state == {k: v for k, v in STATE.items() if k != "weights"}
    assert (snapshot.global_step, snapshot.config) == (3, "seed: 1\n")
    assert snapshot.facts["validation"]["value"] == 0.5
    assert names(tmp_path) == ["step_00000003"]


def test_the_newest_stay_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 99_999_999, 100_000_000):
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
        prune(folder, keep_last=1, keep_best=count)
        assert names(folder) == places([*best, 9])


def places(steps: list[int]) -> list[str]:
    return [f"step_{step:08d}" for step in steps]


def test_a_value_has_to_beat_the_last_of_the_best_if_there_are_enough(tmp_path: Path) -> None:
    save(tmp_path, 3, 0.1)
    assert [folders.rank_to_beat(tmp_path, best) for best in (1, 2)] == [-0.1, float("inf")]


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
    with pytest.raises(CheckpointError, match=r"the state holds numpy\S+, and loading it would"):
        save(tmp_path, 2, value=np.float64(1.0))
    for fails in ("torch.save", "mpframe.checkpoint.saving.sync_paths"):
        with monkeypatch.context() as patched:
            patched.setattr(fails, full)
            with pytest.raises(
                CheckpointError, match=r"could not be written \(No space left on dev"
            ):
                save(tmp_path, 2)
    assert names(tmp_path) == places([1])
    assert checkpoint.load(tmp_path)["steps"] == 3


def test_a_background_does_one_thing_at_a_time_and_raises_what_failed() -> None:
    seen: list[str] = []
    with closing(Background()) as background:
        background.start(lambda: seen.append("first"))
        background.start(lambda: seen.append("second"))
        background.wait()
        assert seen == ["first", "second"]
        background.start(full)
        with pytest.raises(OSError, match="No space"):
            background.start(lambda: seen.append("third"))
        assert seen == ["first", "second"]
    background = Background()
    background.start(full)
    with pytest.raises(OSError, match="No space"):
        background.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")] == []


# The parts that ranks wrote become whole tensors again, and nothing else does.

FIVE = torch.arange(10.0).view(5, 2)
PLACE = ("trainer", "weights", "w")


def put(folder: Path, ranks: list[Any]) -> Any:
    """The state that these parts make whole."""
    own = {"trainer": {"weights": {"w": None, "tied": None}, "optimizer": {0: {"m": None}}}}
    paths = [folder / parts_of(rank) for rank in range(len(ranks))]
    for path, parts in zip(paths, ranks, strict=True):
        torch.save(parts, path)
    put_together(own, paths)
    return own["trainer"]


def test_the_parts_of_all_ranks_are_the_tensor(tmp_path: Path) -> None:
    """An empty one, too; what several names share is one tensor."""
    other, moment = ("trainer", "weights", "tied"), ("trainer", "optimizer", 0, "m")
    pieces = [piece.clone() for piece in (FIVE[:3], FIVE[3:], FIVE[5:])]
    own = put(tmp_path, [{PLACE: rows, other: rows, moment: rows + 1} for rows in pieces])
    assert torch.equal(own["weights"]["w"], FIVE)
    assert own["weights"]["tied"] is own["weights"]["w"]
    assert torch.equal(own["optimizer"][0]["m"], FIVE + 1)


def test_the_files_are_in_the_order_of_the_ranks() -> None:
    names = ["state.pt", parts_of(100000), parts_of(2), "parts_1.pt", parts_of(0)]
    assert folders.all_parts(names) == ["parts_00000.pt", "parts_00002.pt", "parts_100000.pt"]


LONG = torch.arange(2.0**16)
HOSTILE: dict[str, list[Any]] = {
    "holds no rank's": [{PLACE: 3}],
    "its tensors overlap": [{("trainer", n): LONG[n:] for n in range(4)}],
    "not parts of its checkpoint": [{PLACE: FIVE}, {}],
    "one holds other tensors": [{}, {PLACE: FIVE}],
    "something in a divided tensor's place": [{("trainer", "weights"): FIVE}],
}


@pytest.mark.parametrize("said", HOSTILE)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as refused:
        put(tmp_path, HOSTILE[said])
    assert str(refused.value).startswith(str(tmp_path))
