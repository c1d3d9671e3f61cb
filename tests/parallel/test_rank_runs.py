"""Runs of several ranks: one run folder, the numbers of one process, and one end for all."""

import logging
import re
from itertools import product
from pathlib import Path

import pytest
import ranked
from in_process import train
from ranked import NET, NOISY, OWN, assert_same_results, summary_in, trouble
from ranks import Ranks
from sameness import differing

from mpframe import checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
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
    ends = two(ranked.run, tmp_path / "run", *NOISY, *trouble(1, 5, "SIGTERM"))
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
