"""Event files and the table of numbers: of a run killed and resumed, or whose disk is full."""

import math
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from fixtures import Log, Patch
from in_process import events, scalars, texts
from refusal import refused

from mpframe.core.errors import MpframeError
from mpframe.tracking import event_file
from mpframe.tracking.metrics_csv import FILE_NAME, MetricsCsv
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


def test_a_clock_that_went_back_mixes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Files are read in the order of their names, and the newer one hides what is repeated."""
    now = time.time()
    for ahead in (0, 10):
        runs = (None, (1, 2, 3), now + ahead), (3, (3,), now), (2, (2,), now)
        for purge_step, steps, clock in runs:
            monkeypatch.setattr(time, "time", lambda clock=clock: clock)
            with Tracker(tmp_path / str(ahead), purge_step) as tracker:
                for step in steps:
                    tracker.scalars(step, {Tag.LOSS_TRAIN: float(purge_step or 1)})
        assert scalars(tmp_path / str(ahead))[Tag.LOSS_TRAIN] == [(1, 1.0), (2, 2.0)]


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
    found, curves = events(tmp_path / folder), scalars(tmp_path / folder)
    assert [curves[Tag.LOSS_TRAIN][-1], *curves[Tag.LOSS_VAL]] == [(2, math.inf), (2, 5.0)]
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


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert refused(MpframeError, Tracker, folder) == (
        f"run folder {folder}: the event file cannot be written (Not a directory); "
        "free space or set hydra.run.dir to a writable folder"
    )


def test_a_full_disk_loses_nothing_and_does_not_hide_what_went_wrong(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    warned, raising, failed = (
        Tracker(tmp_path / name, on_error=on_error)
        for name, on_error in (("a", "warn"), ("b", "stop"), ("c", "stop"))
    )
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr(event_file, "append_whole", full)
        for step in (1, 2):
            warned.scalars(step, {"a": float(step)})
            warned.flush()
        for tracker in (raising, failed):
            tracker.scalars(1, {"a": 1.0})
        with pytest.raises(MpframeError, match=r"written \(No space left on device\); free space"):
            raising.flush()
        with pytest.raises(ZeroDivisionError), failed:
            raise ZeroDivisionError
    for tracker in (warned, raising):
        tracker.close()
    assert scalars(tmp_path / "a")["a"] == [(1, 1.0), (2, 2.0)]
    assert scalars(tmp_path / "b")["a"] == [(1, 1.0)]
    (line,) = caplog.messages
    assert "cannot be written (No space left on device); the curves wait in memory" in line


def test_a_row_is_a_step_and_a_resumed_run_cuts_what_it_repeats(tmp_path: Path) -> None:
    file, table = tmp_path / FILE_NAME, MetricsCsv(tmp_path, ["step", "train_loss", "val_loss"])
    table.add({"step": 10, "train_loss": 1 / 3})
    table.add({"step": 20, "val_loss": float("nan")})
    assert file.read_text() == "step,train_loss,val_loss\n10,0.333333333,\n20,,nan\n"
    table = MetricsCsv(tmp_path, ["step", "a", "b"])  # A new run begins a new table.
    for step in (1, 2, 3):
        table.add({"step": step, "a": step, "b": 2})
    MetricsCsv(tmp_path, ["step", "b", "c"], before=3).add({"step": 3, "b": 3, "c": 4})
    assert file.read_text() == "step,a,b,c\n1,1,2,\n2,2,2,\n3,,3,4\n"
    for there, left in (
        ("a,b\n1,2\n", "step,a\n"),  # no table
        ('step\n"1\n', "step,a\n"),
        ("step,a\n1,0.5\n2,0.2", "step,a\n1,0.5\n"),  # A kill cut it short.
    ):
        file.write_text(there)
        MetricsCsv(tmp_path, ["step", "a"], before=9)
        assert file.read_text() == left
