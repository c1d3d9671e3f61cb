"""Ranks in trouble: one error, one end for all, and what cannot go together is refused."""

import re
import time
from pathlib import Path

import pytest
import ranked
from ranked import OWN, summary_in, torchrun, trouble
from ranks import Ranks, ranks

from mpframe import checkpoint
from mpframe.data import Loader
from mpframe.tracking.summary import Status


def test_an_error_on_one_rank_ends_all_and_says_whose_it_is(two: Ranks, tmp_path: Path) -> None:
    own, other = _with_bad_sample(tmp_path)
    ends = two(ranked.run, tmp_path / "run", *OWN, f"+dataset.bad={own}")
    assert ends[1][0] == "DataError"
    said = ends[1][1]
    assert f"sample {own} holds NaN or inf" in said
    assert ends[0] == ("LostRankError", f"rank 1: {said}")
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("failed", f"rank 1: {said}")
    ends = two(ranked.run, tmp_path / "other", *OWN, f"+dataset.bad={other}")
    assert ends[0][0] == "DataError"
    assert ends[1] == ("LostRankError", f"rank 0: {ends[0][1]}")


def _with_bad_sample(tmp_path: Path) -> tuple[int, int]:
    """Two samples of the third batch: one of rank 1's part, one of rank 0's."""
    order = Loader(ranked.Points(32, None), 8, shuffle=True).batch_ids(0, 2).tolist()
    return order[-1], order[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_model_that_begins_otherwise_on_each_rank_is_refused(
    two: Ranks, tmp_path: Path, parallel: str
) -> None:
    own = [*OWN[:4], "model._target_=ranked.seeded_otherwise", f"trainer.parallel={parallel}"]
    for kind, said in two(ranked.run, tmp_path / "run", *own):
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
    order = Loader(ranked.Points(32, None), 8, shuffle=True).batch_ids(0, batch)[4:].tolist()
    text = report.read_text()
    assert f"epoch 0, batch {batch}, rank 1" in text
    assert ", ".join(map(str, order)) in text


REFUSED = {
    "dataset.batch_size=7": "2 ranks share each batch; use a multiple of 2, as 8",
    "trainer.parallel=none": "torchrun has started 2 processes, and each would train the same; use "
    "trainer.parallel=ddp, or start one process",
    "trainer.parallel=dpp": "must be one of none, ddp, fsdp; nearest: ddp, fsdp",
    "device=cuda:1": "each rank takes its own device; choose auto, cpu or cuda",
}


def test_what_ranks_cannot_do_is_refused(two: Ranks, tmp_path: Path) -> None:
    ends = two(ranked.runs, tmp_path / "run", [[*OWN, option] for option in REFUSED])
    said = [("ConfigError", f"{option}: {text}") for option, text in REFUSED.items()]
    assert ends == [said, said]


OTHERWISE = {
    "dtype=amp": ("dtype.mode=amp", "mixed"),
    "trainer.parallel=fsdp": ("trainer.parallel=fsdp", "null"),
    "resume=auto": ("resume=auto", "none"),
    "callbacks=[default,early_stopping]": (
        "callbacks.early_stopping._target_=mpframe.training.callbacks.guards.EarlyStopping",
        "null",
    ),
}


def test_ranks_with_other_options_are_refused_by_name(two: Ranks, tmp_path: Path) -> None:
    """However the option would be noticed later, if at all."""
    options = [[own] for own in OTHERWISE]
    ends = two(ranked.runs_otherwise, tmp_path / "run", OWN, options, within=90)
    for own, (option, first) in enumerate(OTHERWISE.values()):
        said = f"{option}: rank 1 has it, and rank 0 has {first}; start all ranks with the same"
        assert ends[0][own] == ends[1][own]
        assert ends[0][own][0] == "ConfigError"
        assert ends[0][own][1].startswith(said)
    assert {p.name for p in (tmp_path / "run").rglob("*") if p.is_file()} == {".lock"}


def test_where_a_rank_finds_its_data_is_its_own_affair(two: Ranks, tmp_path: Path) -> None:
    options = ["trainer.timeout=9", "run_name=later"]
    (first, second) = two(ranked.runs_otherwise, tmp_path / "run", OWN, [options])
    assert (first[0].status, second[0].steps) == (Status.FINISHED, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["optimizer.lrr=7"],
            "optimizer.lrr: no such option; nearest: optimizer.lr; an argument of your own class: "
            "+optimizer.lrr=...",
        ),
        (
            ["experiment=ladder_digits"],
            "hydra.mode=MULTIRUN: torchrun has started 2 processes for one run; start one torchrun "
            "for each job of the sweep",
        ),
    ],
)
def test_a_mistake_is_said_once(tmp_path: Path, words: list[str], said: str) -> None:
    done = torchrun(*words, *(f"hydra.{kind}.dir={tmp_path}/{kind}" for kind in ("run", "sweep")))
    assert done.returncode == 1
    # Another rank says it if rank 0 comes to it seconds later, as it may on a busy machine.
    lines = re.sub(r"^mpframe: rank 1: ", "mpframe: ", done.stderr, flags=re.M)
    assert re.findall(r"^mpframe: .*", lines, re.M) == [f"mpframe: {said}"]
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    ("name", "timeout", "how"),
    [
        ("SIGKILL", 300, "trainer.reduce=in_backward"),
        pytest.param("SIGKILL", 300, "trainer.parallel=fsdp", marks=pytest.mark.slow),
        pytest.param("SIGSTOP", 3, "trainer.reduce=after_backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_or_hangs_ends_the_others(
    tmp_path: Path, name: str, timeout: int, how: str
) -> None:
    """Also where torch's own collectives are met first, whose errors come out of the model."""
    with ranks(2) as own:
        began = time.monotonic()
        options = [*trouble(1, 2, name), f"trainer.timeout={timeout}", how]
        own.begin(ranked.run, tmp_path / "run", *OWN, *options)
        if name == "SIGKILL":
            own.processes[1].join(60)
            began = time.monotonic()
        kind, said = own.results_of(0)
        assert time.monotonic() - began < (15 if name == "SIGKILL" else 60)
    assert kind == "LostRankError"
    assert said.startswith(f"rank 1: was killed, or gave no answer for {timeout} s")
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("failed", said)


@pytest.mark.slow
def test_a_rank_0_that_hangs_is_named_where_it_keeps_the_store_itself(tmp_path: Path) -> None:
    """No agent of torchrun does; questions to the store have no end then."""
    with ranks(2) as own:
        own.begin(
            ranked.run, tmp_path / "run", *OWN, *trouble(0, 2, "SIGSTOP"), "trainer.timeout=3"
        )
        kind, said = own.results_of(1)
        own.processes[0].kill()
    assert (kind, said) == (
        "LostRankError",
        "rank 0: was killed, or gave no answer for 3 s (trainer.timeout); continue with "
        "resume=auto",
    )
