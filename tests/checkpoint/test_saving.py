"""When checkpoints are made and which stay; and what a disk that fails does to a run."""

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_process import StartRun, scalars
from sameness import differing

from mpframe import checkpoint
from mpframe.checkpoint import saving
from mpframe.checkpoint.folder import best_in
from mpframe.core.errors import CheckpointError, ConfigError, MpframeError, RunInterrupted
from mpframe.lab.ranges import read_ranges
from mpframe.tracking import event_file
from mpframe.tracking.amax_record import read_amax
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import checkpoints
from mpframe.training.callbacks.checkpoints import Checkpoints
from mpframe.training.trainer import Trainer

OPTIONS = [
    "model=mlp", "model.hidden=32", "trainer.epochs=1", "trainer.max_steps=10",
    "trainer.log_every=1",
]  # fmt: skip


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.all_in(folder)]


def test_the_last_step_is_saved_whatever_was_due(start_run: StartRun, tmp_path: Path) -> None:
    start_run(tmp_path, *OPTIONS, "trainer.checkpoint_every=4", "trainer.keep_last=9")
    assert steps(tmp_path) == [4, 8, 10]


def test_saved_by_the_clock(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves on by ten seconds each time it is read, which is once a step."""
    ticks = iter(range(0, 100_000, 10))
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    start_run(tmp_path, *OPTIONS, "trainer.checkpoint_every=0.5min", "trainer.keep_last=9")
    assert steps(tmp_path) == [3, 6, 9, 10]


def test_the_best_are_saved_when_made_and_kept(start_run: StartRun, tmp_path: Path) -> None:
    options = ["trainer.eval_every=1", "trainer.checkpoint_every=5", "trainer.keep_last=1"]
    start_run(tmp_path, *OPTIONS, *options, "trainer.keep_best=2", "optimizer.lr=0.03")
    curve = scalars(tmp_path)["metric/accuracy/val"]
    best = sorted(curve, key=lambda point: (-point[1], point[0]))[:2]
    assert {step for step, _ in best} | {10} == set(steps(tmp_path))
    assert [path.name for path in best_in(tmp_path, 2)] == [f"step_{step:08d}" for step, _ in best]


def test_of_a_metric_that_does_not_say_which_is_better_the_loss_decides(
    start_run: StartRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr("mpframe.data.metrics.Accuracy.higher_is_better")
    start_run(tmp_path, *OPTIONS, "trainer.eval_every=2", "optimizer.lr=0.03")
    curve = scalars(tmp_path)["loss/val"]
    best, _ = min(curve, key=lambda point: (point[1], point[0]))
    assert [path.name for path in best_in(tmp_path, 1)] == [f"step_{best:08d}"]
    (said,) = [line for line in caplog.messages if "keep_best" in line]
    assert said == (
        "warning: trainer.keep_best=1: metric accuracy does not say which value is better, so the "
        "best is the one with the lowest validation loss; give the metric higher_is_better = True "
        "or False"
    )


def test_a_save_in_the_background_holds_its_own_step(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written slowly, while the weights move on: each is what the run was at its step."""
    options = [*OPTIONS, "trainer.checkpoint_every=2", "trainer.keep_last=99"]
    start_run(tmp_path / "whole", *options)
    save, under_way, most = checkpoint.save, [0], [0]

    def slowly(*arguments: object) -> Path:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.1)
        try:
            return save(*arguments)  # type: ignore[arg-type]
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(checkpoint, "save", slowly)
    start_run(tmp_path / "background", *options, "trainer.async_save=true")
    assert (most[0], under_way[0]) == (1, 0)
    assert steps(tmp_path / "background") == [2, 4, 6, 8, 10]
    for first, second in zip(
        checkpoint.all_in(tmp_path / "whole"),
        checkpoint.all_in(tmp_path / "background"),
        strict=True,
    ):
        assert differing(checkpoint.load(first), checkpoint.load(second)) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run's folder whose checkpoints lie on a disk of their own, with room for one or two."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield tmp_path / "run"
    subprocess.run(["umount", "-l", str(place)], check=True)


FAILING = ["model.hidden=96", "trainer.checkpoint_every=2", "trainer.keep_last=9"]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoints_whole(
    start_run: StartRun, small_disk: Path, background: bool
) -> None:
    said = (
        r"^checkpoint \S+ could not be written \(No space left on device\); older checkpoints are"
    )
    with pytest.raises(CheckpointError, match=said):
        start_run(small_disk, *OPTIONS, *FAILING, f"trainer.async_save={background}")
    assert Summary.read(small_disk).status == "failed"
    (whole,) = checkpoint.all_in(small_disk)
    assert checkpoint.read(whole).global_step == 2
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_may_be_warned_of_only(
    start_run: StartRun, small_disk: Path, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["trainer.on_save_error=warn", f"trainer.async_save={background}"]
    assert start_run(small_disk, *OPTIONS, *FAILING, *options).status == "finished"
    said = [line for line in caplog.messages if line.startswith("warning: checkpoint ")]
    tried = [int(line.split(" could")[0].split("step_")[1]) for line in said]
    assert tried == [4, 6, 8, 10, 10]  # The last step's once more at the end.
    assert checkpoint.load(small_disk)["trainer"]["progress"]["steps"] == 2


@pytest.fixture
def small_folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder on a disk of its own."""
    place = tmp_path / "all"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def filled(folder: Path, patched: pytest.MonkeyPatch, from_step: int, to_step: int) -> None:
    """Let the disk of a folder be full to its last byte from one step to another."""
    whole = Checkpoints.on_step_end

    def on_step_end(saves: Checkpoints, trainer: Trainer) -> None:
        if trainer.progress.global_step == to_step:
            (folder / "filler").unlink()
        if trainer.progress.global_step == from_step:
            with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
        whole(saves, trainer)

    patched.setattr(Checkpoints, "on_step_end", on_step_end)


def test_a_disk_full_to_the_last_byte_is_one_line(
    start_run: StartRun,
    small_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    filled(small_folder, monkeypatch, 3, 99)
    with pytest.raises(MpframeError, match=r"written \(No space left on device\)") as caught:
        start_run(small_folder, *OPTIONS, *FAILING)
    assert "\n" not in str(caught.value)
    assert not (small_folder / "summary.json").exists()
    (line,) = (line for line in caplog.messages if "summary.json" in line)
    assert re.search(r"^warning: .*summary\.json.* cannot be written \(No space left", line), line
    assert [path.name for path in small_folder.glob(".summary*")] == []


@pytest.mark.parametrize("to_step", [8, 99])
def test_a_disk_full_to_the_last_byte_may_be_warned_of_only(
    start_run: StartRun, small_folder: Path, monkeypatch: pytest.MonkeyPatch, to_step: int
) -> None:
    filled(small_folder, monkeypatch, 3, to_step)
    monkeypatch.setattr(event_file, "_SECONDS", 0.0)
    options = [*OPTIONS, *FAILING, "trainer.on_save_error=warn", "trainer.log_every=1"]
    options += ["numerics=on", "numerics.every=2"]
    assert start_run(small_folder, *options).steps == 10
    if to_step == 8:  # What waited for room is there.
        assert [report.step for report in read_ranges(small_folder)] == [2, 4, 6, 8, 10]
        assert [step for step, _ in scalars(small_folder)["loss/train"]] == list(range(1, 11))
        assert len(read_amax(small_folder)) == 10
        assert Summary.read(small_folder).status == "finished"
        assert checkpoint.read(small_folder).global_step == 10


def test_a_folder_gone_read_only_is_named(start_run: StartRun, small_disk: Path) -> None:
    start_run(small_disk, *OPTIONS, "trainer.max_steps=2")
    place = small_disk / "checkpoints"
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(CheckpointError, match=r"could not be written \(Read-only file system\)"):
        start_run(small_disk, *OPTIONS, "trainer.max_steps=4", "resume=auto")
    assert checkpoint.load(small_disk)["trainer"]["progress"]["steps"] == 2


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_may_be_warned_of_while_the_best_are_saved(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    """Before a best one is ranked the save under way ends, whose error must not end the run."""

    def fail(*_: object) -> None:
        raise CheckpointError("checkpoint could not be written (No space left on device)")

    monkeypatch.setattr(checkpoint, "save", fail)
    options = [*OPTIONS, "trainer.on_save_error=warn", f"trainer.async_save={background}"]
    assert start_run(tmp_path, *options, "trainer.eval_every=1").steps == 10


@pytest.mark.parametrize(("best", "kept"), [(0, 0), (2, 2)])
def test_a_run_that_keeps_none_of_the_newest(
    start_run: StartRun, tmp_path: Path, best: int, kept: int
) -> None:
    options = ["trainer.keep_last=0", f"trainer.keep_best={best}", "trainer.eval_every=1"]
    summary = start_run(tmp_path, *OPTIONS, *options, "trainer.checkpoint_every=2")
    assert (summary.status, summary.steps) == ("finished", 10)
    assert checkpoint.all_in(tmp_path) == sorted(best_in(tmp_path, 2))
    assert len(checkpoint.all_in(tmp_path)) == kept


def test_a_run_that_saves_nothing_says_so_if_it_is_stopped(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "on_optimizer_step", stop)
    with pytest.raises(RunInterrupted) as stopped:
        start_run(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.eval_every=3")
    assert str(stopped.value) == (
        "stopped by SIGTERM; trainer.keep_last=0: where it stopped is not saved"
    )
    assert checkpoint.all_in(tmp_path) == []
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *OPTIONS, "trainer.keep_last=0", "trainer.requeue=true", "resume=auto")
    assert str(refused.value) == (
        "trainer.keep_last=0: trainer.requeue=true needs checkpoints; use 1"
    )


def test_an_error_of_a_terminal_or_of_the_data_is_not_blamed_on_the_runs_folder(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Checkpoints, "on_evaluate", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        start_run(tmp_path, *OPTIONS)
    assert "hydra.run.dir" not in str(raised.value)


RECORDS = {"metrics.csv", "log2_amax.txt", "numerics/ranges.bin", "numerics/products.csv"}
WATCHED = [
    *OPTIONS,
    "dtype=mixed_bf16",
    "dtype.products=fp8_tensorwise",
    "numerics=on",
    "numerics.every=2",
    "trainer.checkpoint_every=4",
]


@pytest.mark.parametrize("background", ["true", "false"])
def test_curves_are_on_the_disk_before_a_checkpoint_counts(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: str
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
    start_run(tmp_path, *WATCHED, f"trainer.async_save={background}", "trainer.keep_last=9")
    assert [name for name, _ in made] == ["step_00000004", "step_00000008", "step_00000010"]
    for name, on_disk in made:
        sizes = checkpoint.read(tmp_path / "checkpoints" / name).facts["records"]
        events = [record for record in sizes if record.startswith("events")]
        assert set(sizes) - set(events) == RECORDS
        assert len(events) == 1
        for record, size in sizes.items():
            assert on_disk[str(tmp_path / record)] >= size > 0, (name, record)
    assert len(read_amax(tmp_path)) == 10


def test_a_record_that_cannot_be_synced_makes_no_checkpoint(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(paths: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saving, "sync_paths", fail)
    with pytest.raises(CheckpointError, match="could not be written"):
        start_run(tmp_path, *OPTIONS)
    assert checkpoint.all_in(tmp_path) == []


def test_a_resume_says_which_curves_have_lost_rows(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path, *WATCHED)
    start_run(tmp_path, *WATCHED, "resume=auto")
    assert [line for line in caplog.messages if "shorter" in line] == []
    sizes = checkpoint.read(tmp_path).facts["records"]
    for name, size in sizes.items():
        os.truncate(tmp_path / name, size - 40 if name != "metrics.csv" else 0)
    start_run(tmp_path, *WATCHED, "resume=auto", "trainer.max_steps=12")
    (line,) = (line for line in caplog.messages if "shorter" in line)
    said = ", ".join(
        f"{name} ({size - 40 if name != 'metrics.csv' else 0} of {size} bytes)"
        for name, size in sizes.items()
    )
    assert line == (
        f"warning: shorter than when step_00000010 was made: {said}; what was lost stays missing "
        "from the curves"
    )
    start_run(tmp_path, *WATCHED, "resume=auto", "trainer.max_steps=14")  # It is said once.
    assert len([line for line in caplog.messages if "shorter" in line]) == 1


def test_a_run_that_goes_on_elsewhere_has_lost_no_rows(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path / "first", *OPTIONS)
    start_run(tmp_path / "second", *OPTIONS, f"resume={tmp_path / 'first'}", "trainer.max_steps=12")
    assert [line for line in caplog.messages if "shorter" in line] == []
