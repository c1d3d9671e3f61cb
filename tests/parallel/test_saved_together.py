"""Checkpoints that ranks write and read together: in the background, on bad disks, in parts."""

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from fixtures import Patch
from in_process import differing
from ranked import CPU, NET, SHARDED, assert_same_results
from ranks import Ranks
from slow_disk import disk
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint import saving
from mpframe.checkpoint.parts import Pieces
from mpframe.core.comm import is_sharded, part_of
from mpframe.core.errors import CheckpointError
from mpframe.parallel.launch import init_comm
from mpframe.tracking.summary import Status

FSDP = [*NET, f"dtype={SHARDED}", "trainer.ema_decay=0.9", "trainer.keep_last=3",
        "callbacks.autopsy=null", "trainer.parallel=fsdp"]  # fmt: skip
BEHIND = [*FSDP, "trainer.async_save=true"]
FIVE = torch.arange(10.0).view(5, 2)


@pytest.fixture(scope="module")
def whole(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks that saved while they waited."""
    folder: Path = tmp_path_factory.mktemp("whole") / "run"
    ends = two(ranked.run, folder, *FSDP)
    assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
    return folder


def five() -> Pieces:
    """FIVE in four pieces."""
    cuts = [(0, 0, 3, 1), (3, 0, 2, 1), (0, 1, 3, 1), (3, 1, 2, 1)]
    pieces = {(r, c): FIVE[r : r + rows, c : c + cols] for r, c, rows, cols in cuts}
    return Pieces((5, 2), pieces, FIVE.dtype)


def test_pieces_are_the_tensor_and_a_slice_reads_only_itself(monkeypatch: Patch) -> None:
    made: list[int] = []
    whole = Pieces.whole
    monkeypatch.setattr(Pieces, "whole", lambda own: made.append(own.numel()) or whole(own))
    assert torch.equal(five() * 2, FIVE * 2)
    assert made == [10]
    rows = [slice(*ends) for ends in ((2, 4), (-4,), (4, 9), (5, 9), (4, 2))]
    for index in (*rows, (slice(None), slice(1, 2))):
        made.clear()
        cut = five()[index]
        assert (type(cut), cut.shape, made) == (Pieces, FIVE[index].shape, [])
        taken = cut.to(torch.float32)
        assert type(taken) is Tensor
        assert torch.equal(taken, FIVE[index])
        assert made == [taken.numel()]
    assert torch.equal(five()[1:, :1][2:], FIVE[1:, :1][2:])


def test_pieces_take_no_writes() -> None:
    own = five()
    with pytest.raises(RuntimeError, match=r"mul_\S*: a checkpoint's tensor is read-only; copy it"):
        own.mul_(2)
    assert torch.equal(torch.zeros(5, 2).copy_(own), FIVE)


@pytest.mark.slow
def test_ranks_save_in_the_background_what_they_save_while_they_wait(
    two: Ranks, whole: Path, tmp_path: Path
) -> None:
    """Slowly, while the weights move on."""
    meanwhile = tmp_path / "meanwhile"
    slow = disk(1, "slow", 1.0, file=meanwhile)
    ends = two(ranked.run, tmp_path / "run", *BEHIND, *slow)
    assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
    assert int(meanwhile.read_text()) > 0
    for ours, theirs in zip(*map(checkpoint.all_in, (whole, tmp_path / "run")), strict=True):
        found = differing(checkpoint.load(ours), checkpoint.load(theirs))
        assert [path for path in found if not path.startswith("/usage")] == []


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_all_at_the_next_save(two: Ranks, tmp_path: Path) -> None:
    """The checkpoint before is whole, and nothing of the other is left."""
    options = [*BEHIND, "trainer.checkpoint_every=2", *disk(1, "full", after=2)]
    (kind, text), other = two(ranked.run, tmp_path / "run", *options)
    assert (kind, text) == other == ("CheckpointError", text)
    made = tmp_path / "run" / "checkpoints"
    assert text.startswith(f"checkpoint {made}/step_00000004 could not be written (No space left")
    assert [path.name for path in made.iterdir()] == ["step_00000002"]
    assert checkpoint.read(tmp_path / "run").global_step == 2


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_leaves_the_older_ones(
    two: Ranks, whole: Path, tmp_path: Path
) -> None:
    """And the run goes on from there, to the same."""
    with Ranks(2) as own:
        own.begin(ranked.run, tmp_path / "run", *BEHIND, *disk(1, "kill", 0.5, after=4))
        kind, said = own.results_of(0)
    assert (kind, said[:21]) == ("LostRankError", "rank 1: was killed, o")
    assert [path.name for path in checkpoint.all_in(tmp_path / "run")] == ["step_00000004"]
    two(ranked.run, tmp_path / "run", *BEHIND, "resume=auto")
    assert_same_results(whole, tmp_path / "run")


def agreed(late: float) -> tuple[list[Any], list[str]]:
    """What this rank gets of work that takes rank 1 so long, and what it logs."""
    said: list[str] = []

    def work(rank: int) -> int:
        time.sleep(late * rank)
        if late and rank:
            raise CheckpointError("it is full")
        return rank

    with pytest.MonkeyPatch.context() as patched, init_comm(None, lambda: CPU, 2.0) as comm:
        patched.setattr(saving, "_LONG", 0.5)
        patched.setattr(saving.log, "warning", lambda text, *facts: said.append(text % facts))
        try:
            return saving.on_all(comm, partial(work, comm.rank), "doing it"), said
        except CheckpointError as error:
            return [str(error)], said


def test_the_log_names_the_rank_that_the_others_wait_for(two: Ranks) -> None:
    """Longer than ranks without an answer are waited for."""
    assert two(agreed, 0.0) == [([0, 1], [])] * 2
    for found, said in two(agreed, 3.3):
        assert found == ["it is full"]
        assert said[0] == "warning: rank 1: still doing it after 0 s"
        assert len(said) == 3  # At 0.5 s, 1 s and 2 s.


def read_again(folder: Path, options: list[str]) -> dict[str, Any]:
    """How much of a checkpoint this rank puts together at once, of how much, when it resumes."""
    made: list[int] = []
    whole, restored = Pieces.whole, dict[str, Any]()

    def counted(own: Pieces) -> Tensor:
        made.append(own.numel())
        return whole(own)

    def kept(trainer: Any, *_: Any) -> None:
        state = trainer.state_dict()
        named = [*state["optimizer"]["state"].values(), state["weights"], state["ema"]]
        values = [value for one in named for value in one.values() if is_sharded(value)]
        held = sum(part_of(value).untyped_storage().nbytes() for value in values) / 4
        restored.update(read=sum(made), held=held, whole=sum(v.numel() for v in values))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pieces, "whole", counted)
        patched.setattr("mpframe.training.trainer.Trainer.fit", kept)
        end = ranked.run(folder, *options, f"resume={folder.parent / 'run'}")
    return {"end": end, "largest": max(made), **restored}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resumed_rank_reads_and_holds_its_parts(
    two: Ranks, whole: Path, tmp_path: Path, parallel: str
) -> None:
    """From whole tensors in one file, and from each rank's."""
    if parallel == "ddp":
        two(ranked.run, tmp_path / "run", *FSDP[:-1], "trainer.parallel=ddp")
    else:
        shutil.copytree(whole, tmp_path / "run")
    weights = checkpoint.load(whole)["trainer"]["weights"]
    largest = max(weight.numel() for weight in weights.values())
    for found in two(read_again, tmp_path / "resumed", [*FSDP, "trainer.checkpoint_every=null"]):
        assert found["largest"] == largest / 2, found
        assert found["read"] == found["held"] == found["whole"] / 2


def test_damage_that_one_rank_finds_is_said_on_all(two: Ranks, whole: Path, tmp_path: Path) -> None:
    """Each verifies a share of the files. With resume=auto all take the checkpoint before."""
    shutil.copytree(whole, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    files = [*saving.Manifest.read(newest).files]
    for number, name in enumerate(files):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[:-9] + bytes(9))
        ends = two(ranked.run, tmp_path / f"{number}", *FSDP, f"resume={newest}")
        said = f"rank {number % 2}: {newest / name}: damaged, its digest differs; use an older one"
        assert ends == [("CheckpointError", said)] * 2
        if number + 1 < len(files):
            (newest / name).write_bytes(content)
    ends = two(ranked.run, tmp_path / "run", *FSDP, "resume=auto")
    assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
    assert_same_results(whole, tmp_path / "run")


@pytest.mark.slow
def test_a_state_that_one_rank_cannot_take_is_passed_over_by_all(
    two: Ranks, tmp_path: Path
) -> None:
    unfit = "_target_=slow_disk.Unfit rank=1 step=8"
    options = [*FSDP, *(f"+callbacks.unfit.{word}" for word in unfit.split())]
    two(ranked.run, tmp_path / "run", *options)
    options, newest = [*options, "trainer.max_steps=9"], checkpoint.newest(tmp_path / "run")
    ends = two(ranked.run, tmp_path / "other", *options, f"resume={newest}")
    assert ends == [("CheckpointError", f"{newest}: it does not fit")] * 2
    ends = two(ranked.run, tmp_path / "run", *options, "resume=auto")
    assert [getattr(end, "steps", end) for end in ends] == [9, 9]
