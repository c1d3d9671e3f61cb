"""Checkpoints that ranks write and read together: in the background, on bad disks, in parts."""

import os
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
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint import saving
from mpframe.checkpoint.parts import Pieces
from mpframe.core.comm import is_sharded, part_of
from mpframe.core.errors import CheckpointError
from mpframe.core.tree import tensors_in
from mpframe.run import resume
from mpframe.tracking.summary import Status
from mpframe.training.parallel.launch import init_comm

FSDP = [*NET, f"dtype={SHARDED}", "trainer.ema_decay=0.9", "trainer.keep_last=3",
        "callbacks.autopsy=null", "trainer.parallel=fsdp"]  # fmt: skip

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


def test_pieces_are_the_tensor_take_no_writes_and_a_slice_reads_only_itself(
    monkeypatch: Patch,
) -> None:
    made: list[int] = []
    whole = Pieces.whole
    monkeypatch.setattr(Pieces, "whole", lambda own: made.append(own.numel()) or whole(own))
    assert torch.equal(five() * 2, FIVE * 2)
    assert made == [10]
    with pytest.raises(RuntimeError, match=r"mul_\S*: a checkpoint's tensor is read-only; copy it"):
        five().mul_(2)
    assert torch.equal(torch.zeros(5, 2).copy_(five()), FIVE)
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


def run_on_a_slow_disk(folder: Path, *options: str) -> Any:
    sync = saving.sync_file
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "sync_file", lambda file: (time.sleep(0.3), sync(file)))
        return ranked.run(folder, *options)


def test_ranks_save_in_the_background_what_they_save_while_they_wait(
    two: Ranks, whole: Path, tmp_path: Path
) -> None:
    """Slowly, while the weights move on."""
    ends = two(run_on_a_slow_disk, tmp_path / "run", *FSDP, "trainer.async_save=true")
    assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
    for ours, theirs in zip(*map(checkpoint.all_in, (whole, tmp_path / "run")), strict=True):
        found = differing(checkpoint.load(ours), checkpoint.load(theirs))
        assert [path for path in found if not path.startswith("/usage")] == []


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

    def kept(trainer: Any, *_: Any) -> None:
        values = [value for value in tensors_in(trainer.state_dict()) if is_sharded(value)]
        held = sum(part_of(value).untyped_storage().nbytes() for value in values) / 4
        restored.update(read=sum(made), held=held, whole=sum(v.numel() for v in values))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pieces, "whole", lambda own: made.append(own.numel()) or whole(own))
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


def resumed(folder: Path, *options: str) -> Any:
    """On rank 1 the state that is read first does not fit."""
    failed, restore = list[int](), resume.restore

    def take(*given: Any) -> None:
        if os.environ["RANK"] == "1" and not failed:
            failed.append(1)
            raise CheckpointError("it does not fit")
        restore(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resume, "restore", take)
        return ranked.run(folder, *options)


def test_a_state_that_one_rank_cannot_take_is_passed_over_by_all(
    two: Ranks, whole: Path, tmp_path: Path
) -> None:
    newest = checkpoint.newest(whole)
    ends = two(resumed, tmp_path / "other", *FSDP, f"resume={newest}")
    assert ends == [("CheckpointError", f"{newest}: it does not fit")] * 2
    shutil.copytree(whole, tmp_path / "run")
    ends = two(resumed, tmp_path / "run", *FSDP, "resume=auto", "trainer.max_steps=9")
    assert [getattr(end, "steps", end) for end in ends] == [9, 9]
