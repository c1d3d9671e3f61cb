"""Runs of several ranks: one run folder, the numbers of one process, and one end for all."""

import logging
import re
from pathlib import Path

import pytest
import ranked
import torch
from in_process import train
from ranked import NET, NOISY, OWN, summary_in, trouble
from ranks import Ranks
from sameness import differing, results
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
from mpframe.lab.ranges import read_ranges
from mpframe.tracking.summary import Status

OF_OTHERS = ("pymp-", "torchinductor_")


def generators_in(folder: Path) -> list[Tensor]:
    """Of stochastic rounding, of both ranks, in the last checkpoint."""
    state = checkpoint.load(folder)
    products = state["trainer"]["products"], state[OTHER_RANKS][0]["products"]
    return [own["generators"]["cpu"] for own in products]


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that draws for dropout, augmentation and stochastic rounding."""
    folder = tmp_path_factory.mktemp("two") / "run"
    first, second = two(ranked.run, folder, *NOISY)
    assert (first.status, second.status) == (Status.FINISHED, Status.FINISHED)
    # Of Python (pymp-*) it goes with the process; that of torch is for all of its processes.
    assert [path for path in two.scratch.iterdir() if not path.name.startswith(OF_OTHERS)] == []
    return folder


def test_two_ranks_leave_the_folder_and_the_numbers_of_one_process(
    two: Ranks, tmp_path: Path
) -> None:
    first, second = two(ranked.run, tmp_path / "two", *NET)
    one = train(tmp_path / "one", *NET, "dataset.batch_size=32", "trainer.accumulate=2")
    folders = tmp_path / "two", tmp_path / "one"
    names = [{re.sub(r"tfevents.*", "", p.name) for p in own.iterdir()} for own in folders]
    assert names[0] == names[1]
    assert len(list(folders[0].glob("events*"))) == 1
    own, other = map(summary_in, folders)
    assert own.keys() == other.keys()
    for name in ("steps", "epochs", "samples", "status"):
        assert own[name] == other[name]
    states = [checkpoint.load(folder)["trainer"] for folder in folders]
    for part in ("weights", "optimizer", "scaler"):
        assert not differing(states[0][part], states[1][part])
    assert first.train_loss == second.train_loss == one.train_loss
    # Accuracy counts, in whatever batches; the loss of 180 samples is rounded in another order,
    # each sum of at most 64 fp32 terms with a relative error below 64 * 2^-24.
    assert first.val_metric == second.val_metric == one.val_metric
    assert first.test_metrics == second.test_metrics == one.test_metrics
    assert first.val_loss == second.val_loss == pytest.approx(one.val_loss, rel=64 * 2**-24)


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_goes_on_exactly(
    two: Ranks, undisturbed: Path, tmp_path: Path
) -> None:
    assert not torch.equal(*generators_in(undisturbed))
    ends = two(ranked.run, tmp_path / "run", *NOISY, *trouble(1, 5, "SIGTERM"))
    assert [kind for kind, _ in ends] == ["RunInterrupted", "RunInterrupted"]
    assert ends[0] == ends[1]
    assert f"continue with resume=auto hydra.run.dir={tmp_path}/run" in ends[0][1]
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("interrupted", 6)
    two(ranked.run, tmp_path / "run", *NOISY, "resume=auto")
    found = differing(results(undisturbed), results(tmp_path / "run"))
    assert [path for path in found if not path.startswith("/state/usage")] == []


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
    for name in ("weights", "ema", "scaler"):
        assert differing(kept[0][name], kept[1][name]) == []
        assert differing(kept[0][name], kept[2][name]) == []
    assert train(tmp_path / "one", *NOISY, "resume=auto").steps == 8


SEVERAL = {
    "losses": ["experiment=digits_gan"],
    "frozen, in backward": ["callbacks=freeze", "+callbacks.freeze.steps={head.*: 1}", "model=mlp",
                            "trainer.reduce=in_backward", "dtype=amp"],
    "optimizers, in backward": ["optimizer=muon_adamw", "model=mlp", "dtype=mixed",
                                "trainer.reduce=in_backward", "trainer.recompute=[hidden*]"],
}  # fmt: skip


def test_ranks_stay_the_same(two: Ranks, tmp_path: Path) -> None:
    """Checked at each checkpoint: several losses, several optimizers, layers frozen for a while."""
    short = ["trainer.max_steps=3", "trainer.checkpoint_every=1", "dataset.batch_size=32"]
    for summaries in two(ranked.runs, tmp_path, [[*own, *short] for own in SEVERAL.values()]):
        for name, own in zip(SEVERAL, summaries, strict=True):
            assert getattr(own, "status", own) is Status.FINISHED, name
            assert own.steps == 3, name


def test_where_a_rank_finds_its_data_is_its_own_affair(two: Ranks, tmp_path: Path) -> None:
    options = ["trainer.timeout=9", "run_name=later"]
    (first, second) = two(ranked.runs_otherwise, tmp_path / "run", OWN, [options])
    assert (first[0].status, second[0].steps) == (Status.FINISHED, 4)


def test_numerics_count_the_samples_of_all_ranks(two: Ranks, tmp_path: Path) -> None:
    fast = ["callbacks.ranges.layers=[none]", "trainer.timeout=20"]
    two(ranked.run, tmp_path / "run", *OWN, "numerics=on", "numerics.every=4", *fast)
    (report,) = read_ranges(tmp_path / "run")
    assert report.field("activations", "count").tolist() == [8 * 2]  # samples, outputs
    assert report.field("weights", "count").tolist() == [4 * 2 + 2]
