"""The event files of a run that is killed and resumed, or whose disk is full."""

import math
import time
from pathlib import Path

import pytest
from fixtures import Log, Patch
from in_process import events, scalars, texts

from mpframe.core.errors import MpframeError
from mpframe.tracking import event_file
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker


def logged_run(folder: Path, steps: range, purge_step: int | None, offset: float) -> Tracker:
    tracker = Tracker(folder, purge_step)
    tracker.text(Tag.TEXT_CONFIG, f"from {steps.start}")
    tracker.layout()
    for step in steps:
        tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step})
        if step % 4 == 0:
            tracker.scalars(step, {Tag.LOSS_VAL: offset + step})
    tracker.flush()
    return tracker


def test_steps_strictly_increase_after_kill_and_resume(tmp_path: Path) -> None:
    logged_run(tmp_path, range(1, 8), None, 50.0).close()  # An old run, which the new one hides.
    killed = logged_run(tmp_path, range(1, 19), None, 0.0)  # a checkpoint at 10, killed at 18
    logged_run(tmp_path, range(11, 15), 11, 100.0).close()  # killed again, before its checkpoint
    logged_run(tmp_path, range(11, 21), 11, 200.0).close()
    killed.close()
    expected = [(s, float(s)) for s in range(1, 11)] + [(s, 200.0 + s) for s in range(11, 21)]
    assert scalars(tmp_path)[Tag.LOSS_TRAIN] == expected
    assert scalars(tmp_path)[Tag.LOSS_VAL] == [point for point in expected if point[0] % 4 == 0]
    # This reader never hides a text; the server does, and shows one at 0 and one at 11.
    pages = texts(tmp_path, Tag.TEXT_CONFIG)
    assert pages[1:] == [(0, "from 1"), (11, "from 11"), (11, "from 11")]
    layouts = [event.step for event in events(tmp_path).Tensors("custom_scalars__config__")]
    assert layouts[1:] == [0, 11, 11]


@pytest.mark.parametrize("ahead", [0, 10])
def test_a_clock_that_went_back_mixes_nothing(
    tmp_path: Path, monkeypatch: Patch, ahead: int
) -> None:
    """Files are read in the order of their names, and the newer one hides what is repeated."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0})
    monkeypatch.setattr(time, "time", lambda: now)
    for first in (3, 2):
        with Tracker(tmp_path, purge_step=first) as tracker:
            tracker.scalars(first, {Tag.LOSS_TRAIN: float(first)})
    assert scalars(tmp_path)[Tag.LOSS_TRAIN] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("folder", ["run", "elsewhere"])
def test_the_last_step_is_written_again_with_its_meaning(tmp_path: Path, folder: str) -> None:
    """What a resumed run hides from its first step on is in its checkpoint, whatever its kind."""
    with Tracker(tmp_path / "run") as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
        tracker.scalars(2, {Tag.LOSS_TRAIN: math.inf})
        tracker.histogram("counts", [1.0, 3.0], [0.0, 1.0, 2.0], 2)
        kept = tracker.last_step()
        tracker.scalars(3, {Tag.LOSS_TRAIN: 3.0})
    with Tracker(tmp_path / folder, purge_step=2) as tracker:
        tracker.write_again(kept)
        tracker.scalars(2, {Tag.LOSS_VAL: 5.0})
        assert len(tracker.last_step()["events"]) == 3
    found = events(tmp_path / folder)
    assert scalars(tmp_path / folder)[Tag.LOSS_TRAIN][-1] == (2, math.inf)
    assert scalars(tmp_path / folder)[Tag.LOSS_VAL] == [(2, 5.0)]
    assert [e.step for e in found.Histograms("counts")] == [2]
    assert found.SummaryMetadata(Tag.LOSS_TRAIN).summary_description


def test_a_step_that_is_not_hidden_is_not_written_again(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.scalars(2, {"mine": 1.0})
        kept = tracker.last_step()
        tracker.flush()
    with Tracker(tmp_path, purge_step=4) as tracker:  # resumed from step 4, which logged nothing
        tracker.write_again(kept)
        tracker.scalars(6, {"mine": 3.0})
        with pytest.raises(ValueError, match=r"\S"):  # What was never a last step.
            tracker.write_again({"step": 9, "events": ["bm90IGFuIGV2ZW50"]})
    assert scalars(tmp_path)["mine"] == [(2, 1.0), (6, 3.0)]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(MpframeError) as error:
        Tracker(folder)
    assert str(error.value) == (
        f"run folder {folder}: the event file cannot be written (Not a directory); "
        "free space or set hydra.run.dir to a writable folder"
    )


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    warned, refused = Tracker(tmp_path / "a", on_error="warn"), Tracker(tmp_path / "b")
    with monkeypatch.context() as patched:
        patched.setattr(event_file, "append_whole", full)
        for step in (1, 2):
            warned.scalars(step, {"a": float(step)})
            warned.flush()
        refused.scalars(1, {"a": 1.0})
        with pytest.raises(MpframeError, match=r"written \(No space left on device\); free space"):
            refused.flush()
    for tracker in (warned, refused):
        tracker.close()
    assert scalars(tmp_path / "a")["a"] == [(1, 1.0), (2, 2.0)]
    assert scalars(tmp_path / "b")["a"] == [(1, 1.0)]
    (line,) = caplog.messages
    assert "cannot be written (No space left on device); the curves wait in memory" in line


def test_it_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: Patch) -> None:
    def fail(tracker: Tracker) -> None:
        tracker.scalars(1, {"a": 1.0})
        monkeypatch.setattr(event_file, "append_whole", full)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Tracker(tmp_path) as tracker:
        fail(tracker)
