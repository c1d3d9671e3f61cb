"""Ranks in trouble: one error, one end for all, and what cannot go together is refused."""

import re
import time
from pathlib import Path

import pytest
import ranked
from ranked import OWN, rows, summary_in, torchrun, trouble
from ranks import Ranks

from mpframe import checkpoint
from mpframe.data import Loader
from mpframe.tracking.summary import Status


def order_of(batch: int) -> list[int]:
    """The samples of a batch of the first epoch: rank 0's part, and then rank 1's."""
    order: list[int] = Loader(rows(32), 8, shuffle=True).batch_ids(0, batch).tolist()
    return order


def test_an_error_on_one_rank_ends_all_and_says_whose_it_is(two: Ranks, tmp_path: Path) -> None:
    for rank, bad in ((1, order_of(2)[-1]), (0, order_of(2)[0])):
        ends = two(ranked.run, tmp_path / f"{rank}", *OWN, f"+dataset.bad={bad}")
        kind, said = ends.pop(rank)
        assert kind == "DataError"
        assert f"sample {bad} holds NaN or inf" in said
        assert ends == [("LostRankError", f"rank {rank}: {said}")]
    summary = summary_in(tmp_path / "1")
    assert (summary["status"], summary["reason"][:8]) == ("failed", "rank 1: ")


def test_a_model_that_begins_otherwise_on_each_rank_is_refused(two: Ranks, tmp_path: Path) -> None:
    own = [*OWN[:4], "model._target_=ranked.seeded_otherwise"]
    options = [[*own, f"trainer.parallel={parallel}"] for parallel in ("ddp", "fsdp")]
    for ends in two(ranked.runs, tmp_path / "run", options):
        for kind, said in ends:
            assert kind == "UserCodeError"
            assert "weight is not the same on rank 1 as on rank 0 before the first" in said


def test_ranks_that_drift_apart_are_refused_at_the_next_checkpoint(
    two: Ranks, tmp_path: Path
) -> None:
    ends = two(ranked.run, tmp_path / "run", *OWN, "+callbacks.drift._target_=ranked.Drift")
    said = "trainer.parallel=ddp: after step 4 weight is not the same on rank 1 as on rank 0"
    assert all(text.startswith(said) for _, text in ends)
    assert not checkpoint.all_in(tmp_path / "run")


def test_the_autopsy_names_the_sample_of_any_rank(two: Ranks, tmp_path: Path) -> None:
    overflow = ["callbacks.overflow._target_=ranked.Overflow", "trainer.max_consecutive_skips=2"]
    options = [*OWN, "dtype=amp", "loss_scaling=static", f"+{overflow[0]}", overflow[1]]
    first, second = two(ranked.run, tmp_path / "run", *options)
    assert first == second
    assert first[0] == "DivergedError"
    report = Path(first[1].partition("; see ")[2])
    batch = int(report.parent.name.removeprefix("step_")) - 1
    text = report.read_text()
    assert f"epoch 0, batch {batch}, rank 1" in text
    assert ", ".join(map(str, order_of(batch)[4:])) in text


REFUSED = {
    "dataset.batch_size=7": "2 ranks share each batch; use a multiple of 2, as 8",
    "trainer.parallel=none": "torchrun has started 2 processes, and each would train the same; use "
    "trainer.parallel=ddp, or start one process",
    "device=cuda:1": "each rank takes its own device; choose auto, cpu or cuda",
}
OTHERWISE = {
    "dtype=amp": "dtype.mode=amp: rank 1 has it, and rank 0 has mixed",
    "trainer.parallel=fsdp": "trainer.parallel=fsdp: rank 1 has it, and rank 0 has null",
    "callbacks=[default,early_stopping]": "callbacks.early_stopping._target_=mpframe.training."
    "callbacks.guards.EarlyStopping: rank 1 has it, and rank 0 has null",
}


def test_what_ranks_cannot_do_is_refused(two: Ranks, tmp_path: Path) -> None:
    ends = two(ranked.runs, tmp_path / "run", [[*OWN, option] for option in REFUSED])
    said = [("ConfigError", f"{option}: {text}") for option, text in REFUSED.items()]
    assert ends == [said, said]


def test_ranks_with_other_options_are_refused_by_name(two: Ranks, tmp_path: Path) -> None:
    """However the option would be noticed later. Where a rank finds its data is its own affair."""
    options = [[own] for own in OTHERWISE]
    ends = two(ranked.runs_otherwise, tmp_path / "run", OWN, options, within=90)
    assert ends[0] == ends[1]
    for (kind, text), said in zip(ends[0], OTHERWISE.values(), strict=True):
        assert kind == "ConfigError"
        assert text.startswith(f"{said}; start all ranks with the same")
    assert {p.name for p in (tmp_path / "run").rglob("*") if p.is_file()} == {".lock"}
    options = [["trainer.timeout=9", "run_name=later"]]
    for (end,) in two(ranked.runs_otherwise, tmp_path / "other", OWN, options):
        assert (end.status, end.steps) == (Status.FINISHED, 4)


@pytest.mark.slow
def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    done = torchrun("optimizer.lrr=7", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 1
    # Another rank says it if rank 0 comes to it seconds later, as it may on a busy machine.
    lines = re.findall(
        r"^mpframe: (?:rank 1: )?(optimizer.lrr: no such option)?", done.stderr, re.M
    )
    assert lines == ["optimizer.lrr: no such option"]
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    ("rank", "name", "timeout", "how"),
    [
        (1, "SIGKILL", 300, "trainer.reduce=in_backward"),
        pytest.param(1, "SIGKILL", 300, "trainer.parallel=fsdp", marks=pytest.mark.slow),
        pytest.param(1, "SIGSTOP", 3, "trainer.reduce=after_backward", marks=pytest.mark.slow),
        # It keeps the store itself: questions to that have no end then.
        pytest.param(0, "SIGSTOP", 3, "trainer.reduce=in_backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_or_hangs_ends_the_others(
    tmp_path: Path, rank: int, name: str, timeout: int, how: str
) -> None:
    """Also where torch's own collectives are met first, whose errors come out of the model."""
    with Ranks(2) as own:
        began = time.monotonic()
        options = [*trouble(rank, 2, name), f"trainer.timeout={timeout}", how]
        own.begin(ranked.run, tmp_path / "run", *OWN, *options)
        if name == "SIGKILL":
            own.processes[rank].join(60)
            began = time.monotonic()
        kind, said = own.results_of(1 - rank)
        assert time.monotonic() - began < (15 if name == "SIGKILL" else 60)
        own.processes[rank].kill()
    assert kind == "LostRankError"
    assert said.startswith(f"rank {rank}: was killed, or gave no answer for {timeout} s")
    if rank:
        summary = summary_in(tmp_path / "run")
        assert (summary["status"], summary["reason"]) == ("failed", said)
