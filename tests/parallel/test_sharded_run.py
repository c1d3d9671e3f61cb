"""Runs with `trainer.parallel=fsdp`: the numbers of ddp, and checkpoints that anyone reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranked
from in_process import train
from ranks import Ranks
from sameness import differing

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate
from mpframe.tracking.summary import Status

NET = ["model=mlp", "model.hidden=16", "model.dropout=0.2", "dtype=mixed", "trainer.ema_decay=0.9",
       "trainer.clip_norm=null", "trainer.max_steps=8", "trainer.checkpoint_every=4",
       "trainer.keep_last=3", "trainer.keep_best=1", "callbacks.autopsy=null"]  # fmt: skip
FSDP = "trainer.parallel=fsdp"
PARTS = ["parts_00000.pt", "parts_00001.pt"]


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that divide the weights."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    first, second = two(ranked.run, folder, *NET, FSDP)
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED), (first, second)
    return folder


def state_of(folder: Path) -> Any:
    state = checkpoint.load(folder)
    del state["usage"]
    return state


def test_a_run_leaves_what_ddp_leaves(two: Ranks, undisturbed: Path, tmp_path: Path) -> None:
    """Each rank has written half of the weights, of their averages and of the optimizer's state."""
    files = {own.name: own.stat().st_size for own in checkpoint.newest(undisturbed).iterdir()}
    assert sorted(files) == ["config.yaml", "manifest.json", *PARTS, "state.pt"]
    average = checkpoint.load(undisturbed)["trainer"]["ema"]
    divided = 4 * 4 * sum(weight.numel() for weight in average.values())
    for name in PARTS:
        assert divided / 2 < files[name] < divided / 2 + 2**13
    two(ranked.run, tmp_path / "ddp", *NET)
    found = differing(state_of(undisturbed), state_of(tmp_path / "ddp"))
    # The norm is a sum in another order; all else is the same bit for bit.
    assert [path for path in found if not path.endswith("/grad_norm")] == []


def test_other_commands_read_it_in_one_process(undisturbed: Path) -> None:
    """Accuracy counts; the loss of 180 samples is rounded in another order than by two ranks."""
    summary = json.loads((undisturbed / "summary.json").read_text())
    measured = evaluate(undisturbed, []).evaluation
    assert measured.metrics["accuracy"] == summary["test_accuracy"]
    assert measured.loss == pytest.approx(summary["test_loss"], rel=64 * 2**-24)


def test_a_signal_stops_all_and_the_run_goes_on_exactly(
    two: Ranks, undisturbed: Path, tmp_path: Path
) -> None:
    """With the modules run again in the backward pass, for which they are gathered once more."""
    options = [*NET, FSDP, "trainer.recompute=['*']"]
    ends = two(ranked.run, tmp_path / "run", *options, *ranked.trouble(1, 5, "SIGTERM"))
    assert [kind for kind, _ in ends] == ["RunInterrupted", "RunInterrupted"], ends
    two(ranked.run, tmp_path / "run", *options, "resume=auto")
    assert differing(state_of(undisturbed), state_of(tmp_path / "run")) == []


def test_a_checkpoint_is_that_of_any_number_of_processes(
    two: Ranks, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one process, and then fsdp again, reads and writes is what was there, bit for bit."""
    middle, stop = undisturbed / "checkpoints" / "step_00000004", "trainer.max_steps=4"
    assert train(tmp_path / "one", *NET, stop, f"resume={middle}").steps == 4
    assert "world_size=1 (was 2), weights=whole (was divided)" in caplog.text
    two(ranked.run, tmp_path / "two", *NET, FSDP, stop, f"resume={tmp_path}/one")
    for folder in (tmp_path / "one", tmp_path / "two"):
        found = differing(state_of(middle)["trainer"], state_of(folder)["trainer"])
        # The plan is shorter, and so is the schedule.
        found = [path for path in found if not path.startswith("/schedule") and path[-3:] != "/lr"]
        assert found == ["/progress/validated"]  # The runs end here.
    new = [f"init_from={middle}", "init_from_except=[head.*]", "optimizer.lr=1e-9"]
    first, _ = two(ranked.run, tmp_path / "new", *NET, FSDP, *new, "trainer.max_steps=1")
    assert first.status is Status.FINISHED, first
    then, now = (state_of(folder)["trainer"]["weights"] for folder in (middle, tmp_path / "new"))
    for name, weight in then.items():  # A step moves a weight below 1 by about lr, or its last bit.
        same = bool(((weight - now[name]).abs() < 2**-23).all())
        assert same == (not name.startswith("head")), name


def test_a_rank_that_cannot_write_its_part_stops_all(two: Ranks, tmp_path: Path) -> None:
    """Nothing of the checkpoint is left."""
    full = "+callbacks.full._target_=ranked.FullDisk"
    (kind, text), other = two(ranked.run, tmp_path / "run", *NET, FSDP, full)
    assert (kind, text) == other
    assert kind == "CheckpointError"
    assert text.startswith(f"checkpoint {tmp_path}/run/checkpoints/step_00000004 could not be")
    assert "No space left on device" in text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
