"""Runs of several ranks: one run folder, the numbers of one process, and one end for all."""

import json
import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranked
from in_process import differing, train
from ranked import NET, NOISY, OWN, assert_same_results, summary_in, trouble
from ranks import Ranks

from mpframe import checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
from mpframe.cli.commands.evaluate import evaluate
from mpframe.lab.ranges import read_ranges
from mpframe.tracking.summary import Status


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that draws for dropout, augmentation and stochastic rounding."""
    folder = tmp_path_factory.mktemp("two") / "run"
    first, second = two(ranked.run, folder, *NOISY)
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED)
    # Of Python (pymp-*) it goes with the process; that of torch is for all of its processes.
    left = {path.name.partition("-")[0].partition("_")[0] for path in two.scratch.iterdir()}
    assert left <= {"pymp", "torchinductor"}
    return folder


def test_two_ranks_leave_the_folder_and_the_numbers_of_one_process(
    two: Ranks, tmp_path: Path
) -> None:
    first, second = two(ranked.run, tmp_path / "two", *NET)
    one = train(tmp_path / "one", *NET, "dataset.batch_size=32", "trainer.accumulate=2")
    folders = tmp_path / "two", tmp_path / "one"
    names = [sorted(re.sub(r"tfevents.*", "", p.name) for p in own.iterdir()) for own in folders]
    assert names[0] == names[1]
    own, other = map(summary_in, folders)
    assert own.keys() == other.keys()
    for name in ("steps", "epochs", "samples", "status"):
        assert own[name] == other[name]
    states = [checkpoint.load(folder)["trainer"] for folder in folders]
    for part in ("weights", "optimizer", "scaler"):
        assert not differing(states[0][part], states[1][part])
    # Accuracy counts, in whatever batches; the loss of 180 samples is rounded in another order,
    # each sum of at most 64 fp32 terms with a relative error below 64 * 2^-24.
    for name in ("train_loss", "val_metric", "test_metrics"):
        assert getattr(first, name) == getattr(second, name) == getattr(one, name)
    assert first.val_loss == second.val_loss == pytest.approx(one.val_loss, rel=64 * 2**-24)


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_goes_on_exactly(
    two: Ranks, undisturbed: Path, tmp_path: Path
) -> None:
    state = checkpoint.load(undisturbed)  # Each rank rounds with random numbers of its own.
    rounding = [own["products"]["generators"] for own in (state["trainer"], state[OTHER_RANKS][0])]
    assert differing(*rounding)
    limit = "trainer.timeout=20"  # seconds that one rank would wait for the other
    ends = two(ranked.run, tmp_path / "run", *NOISY, *trouble(1, 5, "SIGTERM"), limit)
    assert [kind for kind, _ in ends] == ["RunInterrupted", "RunInterrupted"]
    assert ends[0] == ends[1]
    assert f"continue with resume=auto hydra.run.dir={tmp_path}/run" in ends[0][1]
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("interrupted", 6)
    two(ranked.run, tmp_path / "run", *NOISY, "resume=auto")
    assert_same_results(undisturbed, tmp_path / "run")


def test_a_run_goes_on_with_another_number_of_ranks(
    two: Ranks, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one process, and then two again, read and write is what was there, bit for bit."""
    caplog.set_level(logging.INFO)
    middle, stop = undisturbed / "checkpoints" / "step_00000004", "trainer.max_steps=4"
    train(tmp_path / "one", *NOISY, stop, f"resume={middle}")
    assert "world_size=1 (was 2)" in caplog.text
    two(ranked.run, tmp_path / "two", *NOISY, stop, f"resume={tmp_path}/one")
    kept = [checkpoint.load(own)["trainer"] for own in (middle, tmp_path / "one", tmp_path / "two")]
    for name, other in product(("weights", "ema", "scaler"), kept[1:]):
        assert differing(kept[0][name], other[name]) == []
    assert train(tmp_path / "one", *NOISY, "resume=auto").steps == 8


@pytest.mark.parametrize(
    "options",
    [["experiment=digits_gan"],
     ["callbacks=freeze", "+callbacks.freeze.steps={head.*: 1}", "model=mlp",
      "trainer.reduce=in_backward", "dtype=amp"],
     ["optimizer=muon_adamw", "model=mlp", "dtype=mixed", "trainer.reduce=in_backward",
      "trainer.recompute=[hidden*]"]],
    ids=["losses", "frozen", "optimizers"],
)  # fmt: skip
def test_ranks_stay_the_same(two: Ranks, tmp_path: Path, options: list[str]) -> None:
    """Checked at each checkpoint: several losses, several optimizers, layers frozen for a while."""
    short = ["trainer.max_steps=3", "trainer.checkpoint_every=1", "dataset.batch_size=32"]
    for own in two(ranked.run, tmp_path / "run", *options, *short):
        assert (getattr(own, "status", own), own.steps) == (Status.FINISHED, 3)


def test_numerics_count_the_samples_of_all_ranks(two: Ranks, tmp_path: Path) -> None:
    fast = ["callbacks.ranges.layers=[none]", "trainer.timeout=20"]
    two(ranked.run, tmp_path / "run", *OWN, "numerics=on", "numerics.every=4", *fast)
    (report,) = read_ranges(tmp_path / "run")
    assert report.field("activations", "count").tolist() == [8 * 2]  # samples, outputs
    assert report.field("weights", "count").tolist() == [4 * 2 + 2]


DIVIDED = [*NET, "model.dropout=0.2", "dtype=mixed", "trainer.ema_decay=0.9",
           "trainer.clip_norm=null", "trainer.keep_last=3", "trainer.keep_best=1",
           "callbacks.autopsy=null"]  # fmt: skip
FSDP = "trainer.parallel=fsdp"
PARTS = ["parts_00000.pt", "parts_00001.pt"]


@pytest.fixture(scope="module")
def divided_run(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that divide the weights."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    first, second = two(ranked.run, folder, *DIVIDED, FSDP)
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED), (first, second)
    return folder


def state_of(folder: Path) -> Any:
    state = checkpoint.load(folder)
    del state["usage"]
    return state


def test_a_run_leaves_what_ddp_leaves(two: Ranks, divided_run: Path, tmp_path: Path) -> None:
    """Each rank has written half of the weights, of their averages and of the optimizer's state."""
    files = {own.name: own.stat().st_size for own in checkpoint.newest(divided_run).iterdir()}
    assert sorted(files) == ["config.yaml", "manifest.json", *PARTS, "state.pt"]
    average = checkpoint.load(divided_run)["trainer"]["ema"]
    divided = 4 * 4 * sum(weight.numel() for weight in average.values())
    for name in PARTS:
        assert divided / 2 < files[name] < divided / 2 + 2**13
    two(ranked.run, tmp_path / "ddp", *DIVIDED)
    found = differing(state_of(divided_run), state_of(tmp_path / "ddp"))
    # The norm is a sum in another order; all else is the same bit for bit.
    assert [path for path in found if not path.endswith("/grad_norm")] == []


def test_other_commands_read_it_in_one_process(divided_run: Path) -> None:
    """Accuracy counts; the loss of 180 samples is rounded in another order than by two ranks."""
    summary = json.loads((divided_run / "summary.json").read_text())
    measured = evaluate(divided_run, []).evaluation
    assert measured.metrics["accuracy"] == summary["test_accuracy"]
    assert measured.loss == pytest.approx(summary["test_loss"], rel=64 * 2**-24)


def test_a_signal_stops_all_and_the_run_goes_on_exactly(
    two: Ranks, divided_run: Path, tmp_path: Path
) -> None:
    """With the modules run again in the backward pass, for which they are gathered once more."""
    options = [*DIVIDED, FSDP, "trainer.recompute=['*']"]
    ends = two(ranked.run, tmp_path / "run", *options, *ranked.trouble(1, 5, "SIGTERM"))
    assert [kind for kind, _ in ends] == ["RunInterrupted", "RunInterrupted"], ends
    two(ranked.run, tmp_path / "run", *options, "resume=auto")
    assert differing(state_of(divided_run), state_of(tmp_path / "run")) == []


def test_a_checkpoint_is_that_of_any_number_of_processes(
    two: Ranks, divided_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What one process, and then fsdp again, reads and writes is what was there, bit for bit."""
    middle, stop = divided_run / "checkpoints" / "step_00000004", "trainer.max_steps=4"
    assert train(tmp_path / "one", *DIVIDED, stop, f"resume={middle}").steps == 4
    assert "world_size=1 (was 2), weights=whole (was divided)" in caplog.text
    two(ranked.run, tmp_path / "two", *DIVIDED, FSDP, stop, f"resume={tmp_path}/one")
    for folder in (tmp_path / "one", tmp_path / "two"):
        found = differing(state_of(middle)["trainer"], state_of(folder)["trainer"])
        # The plan is shorter, and so is the schedule.
        found = [path for path in found if not path.startswith("/schedule") and path[-3:] != "/lr"]
        assert found == ["/progress/validated"]  # The runs end here.
    new = [f"init_from={middle}", "init_from_except=[head.*]", "optimizer.lr=1e-9"]
    first, _ = two(ranked.run, tmp_path / "new", *DIVIDED, FSDP, *new, "trainer.max_steps=1")
    assert first.status is Status.FINISHED, first
    then, now = (state_of(folder)["trainer"]["weights"] for folder in (middle, tmp_path / "new"))
    for name, weight in then.items():  # A step moves a weight below 1 by about lr, or its last bit.
        same = bool(((weight - now[name]).abs() < 2**-23).all())
        assert same == (not name.startswith("head")), name


def test_a_rank_that_cannot_write_its_part_stops_all(two: Ranks, tmp_path: Path) -> None:
    """Nothing of the checkpoint is left."""
    full = "+callbacks.full._target_=ranked.FullDisk"
    (kind, text), other = two(ranked.run, tmp_path / "run", *DIVIDED, FSDP, full)
    assert (kind, text) == other
    assert kind == "CheckpointError"
    assert text.startswith(f"checkpoint {tmp_path}/run/checkpoints/step_00000004 could not be")
    assert "No space left on device" in text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
