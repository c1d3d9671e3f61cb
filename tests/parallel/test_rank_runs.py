"""Runs of several ranks: one run folder, the numbers of one process, and one end for all."""

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranked
from fixtures import Log
from in_process import assert_same_run, csv_rows, cut, differing, events, scalars, train
from ranked import NET, NOISY, OWN, SHARDED, assert_same_results, summary_in, trouble, two_formats
from ranks import Ranks

from mpframe import checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
from mpframe.cli.commands.autopsy import of_evidence
from mpframe.cli.commands.evaluate import evaluate
from mpframe.core.errors import CheckpointError
from mpframe.data import Loader
from mpframe.tracking.summary import Status

DIVIDED = [*NET, "model.dropout=0.2", f"dtype={SHARDED}", "trainer.ema_decay=0.9",
           "trainer.clip_norm=null", "trainer.keep_last=3", "trainer.keep_best=1",
           "callbacks.autopsy=null", "trainer.parallel=fsdp"]  # fmt: skip
TOO_HIGH = ["loss_scaling=Backoff", "loss_scaling.init_scale=1048576"]  # for one of two parts
REFUSED = {
    "dataset.batch_size=1": "2 ranks share each batch, and each needs a sample; use 2 or more",
    "device=cuda:1": "each rank takes its own device; choose auto, cpu or cuda",
}
OTHERWISE = {
    "dtype=amp": "dtype.mode=amp: rank 1 has it, and rank 0 has mixed",
    "trainer.parallel=fsdp": "trainer.parallel=fsdp: rank 1 has it, and rank 0 has null",
}


@pytest.fixture(scope="module")
def run_of(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of an undisturbed run of two ranks with these options, made once."""

    @cache
    def made(*options: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("two") / "run"
        ends = two(ranked.run, folder, *options)
        assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
        # Of Python (pymp-*) it goes with the process; that of torch is for all of its processes.
        left = {re.split("[-_]", path.name)[0] for path in two.scratch.iterdir()}
        assert left <= {"pymp", "torchinductor"}
        return folder

    return made


def test_ranks_leave_the_folder_and_the_numbers_of_one_process(two: Ranks, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("options", [NOISY, DIVIDED], ids=["ddp", "fsdp"])
@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(
    two: Ranks, run_of: Any, tmp_path: Path, options: list[str]
) -> None:
    """At the same step, and the run goes on exactly. Each rank rounds with numbers of its own."""
    whole = run_of(*options)
    if options is NOISY:
        state = checkpoint.load(whole)
        parts = state["trainer"], state[OTHER_RANKS][0]
        assert differing(*(own["products"]["generators"] for own in parts))
    else:  # A divided layer that is run again in the backward pass is gathered once more.
        options = [*options, "trainer.recompute=['*']"]
    limit = "trainer.timeout=20"  # seconds that one rank would wait for the other
    ends = two(ranked.run, tmp_path / "run", *options, *trouble(1, 5, "SIGTERM"), limit)
    assert ends[0] == ends[1]
    assert ends[0][0] == "RunInterrupted"
    assert f"continue with resume=auto hydra.run.dir={tmp_path}/run" in ends[0][1]
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("interrupted", 6)
    two(ranked.run, tmp_path / "run", *options, "resume=auto")
    assert_same_results(whole, tmp_path / "run")


@pytest.mark.parametrize("options", [NOISY, DIVIDED], ids=["ddp", "fsdp"])
def test_a_checkpoint_is_that_of_any_number_of_processes(
    two: Ranks, run_of: Any, tmp_path: Path, options: list[str], caplog: Log
) -> None:
    """What one process, and then two again, read and write is what was there, bit for bit."""
    caplog.set_level("INFO")
    middle, stop = run_of(*options) / "checkpoints" / "step_00000004", "trainer.max_steps=4"
    one = [own for own in options if own != "trainer.parallel=fsdp"]
    train(tmp_path / "one", *one, stop, f"resume={middle}")
    changed = "" if options is NOISY else ", weights=whole (was divided)"
    assert f"world_size=1 (was 2){changed}" in caplog.text
    two(ranked.run, tmp_path / "two", *options, stop, f"resume={tmp_path}/one")
    for folder in (tmp_path / "one", tmp_path / "two"):
        found = differing(state_of(middle)["trainer"], state_of(folder)["trainer"])
        # The plan is shorter, and so is the schedule.
        found = [path for path in found if not path.startswith("/schedule") and path[-3:] != "/lr"]
        assert found == ["/progress/validated"]  # The runs end here.
    assert train(tmp_path / "one", *one, "resume=auto").steps == 8


def test_numerics_count_the_samples_of_all_ranks(two: Ranks, tmp_path: Path) -> None:
    fast = ["trainer.timeout=20", "dtype=mixed_bf16"]
    options = [*fast, "dtype.products=fp8_rows", "callbacks.ranges.every=4"]
    two(ranked.run, tmp_path / "run", *OWN, *options)
    found = events(tmp_path / "run")
    for kind, count in {"activations": 8 * 2, "weights": 4 * 2 + 2}.items():  # samples * outputs
        (tag,) = [tag for tag in found.Tags()["histograms"] if f"/{kind}/" in tag]
        assert [report.histogram_value.num for report in found.Histograms(tag)] == [count]
    counted = csv_rows(tmp_path / "run" / "numerics" / "products.csv")
    counts = {row["operand"]: row["values"] for row in counted}
    assert counts["forward.x"] == str(8 * 4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_pictures_and_norms_are_those_of_one_process(
    parallel: str, two: Ranks, tmp_path: Path
) -> None:
    watched = ["callbacks=[default,confusion_matrix,gradient_norms]", "trainer.log_every=1"]
    options = [*NET, *watched, "trainer.clip_norm=null", "callbacks.autopsy=null",
               f"dtype={SHARDED}"]  # fmt: skip
    two(ranked.run, tmp_path / "two", *options, f"trainer.parallel={parallel}")
    train(tmp_path / "one", *options, "dataset.batch_size=32", "trainer.accumulate=2")
    pictures = [tmp_path / n / "validation/confusion_matrix_test.png" for n in ("two", "one")]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    ours, theirs = (scalars(tmp_path / name) for name in ("two", "one"))
    groups = [tag for tag in theirs if tag.startswith("grad/group/")]
    assert len(groups) > 1
    for tag in groups:  # A norm of two halves is a sum in another order.
        assert [step for step, _ in ours[tag]] == [step for step, _ in theirs[tag]]
        values = [value for _, value in theirs[tag]]
        assert [value for _, value in ours[tag]] == pytest.approx(values, rel=1e-5)


def state_of(folder: Path) -> Any:
    state = checkpoint.load(folder)
    del state["usage"]
    return state


@pytest.mark.parametrize(
    ("options", "skipped"),
    [pytest.param(["experiment=digits_gan", "optimizer.skip=all", "loss_scaling=LogMax"], [0, 0],
                  marks=two_formats),
     (["experiment=digits_gan", "optimizer.skip=each", "optimizer.scalers=shared", *TOO_HIGH],
      [3, 0]),
     (["model=mlp", "optimizer=muon_adamw", "optimizer.skip=each", *TOO_HIGH], [0, 2])],
)  # fmt: skip
def test_several_losses_and_optimizers_leave_what_they_leave_with_ddp(
    two: Ranks, tmp_path: Path, options: list[str], skipped: list[int]
) -> None:
    """Also the first scale by a probe, and a part that is skipped where the other moves."""
    words = [*options, "trainer.max_steps=3", "dataset.batch_size=32", f"dtype={SHARDED}"]
    for parallel in ("ddp", "fsdp"):
        own = [*words, f"trainer.parallel={parallel}", "callbacks.autopsy=null"]
        ends = two(ranked.run, tmp_path / parallel, *own)
        assert [getattr(end, "status", end) for end in ends] == [Status.FINISHED] * 2
    ddp, fsdp = (state_of(tmp_path / name) for name in ("ddp", "fsdp"))
    assert [path for path in differing(ddp, fsdp) if not path.endswith("/grad_norm")] == []
    assert list(fsdp["trainer"]["progress"]["part_skips"].values()) == skipped


def test_ranks_go_the_same_way_with_lbfgs(two: Ranks, tmp_path: Path) -> None:
    """To where one process gets with the whole batch, whose mean is rounded otherwise."""
    optimizer = ["optimizer=own", "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.1"]
    options = [*NET, *optimizer, "dtype=fp32", "scheduler=none", "trainer.max_steps=2"]
    first, second = two(ranked.run, tmp_path / "two", *options)
    one = train(tmp_path / "one", *options)
    assert first.val_loss == second.val_loss == pytest.approx(one.val_loss, rel=1e-4)
    start = train(tmp_path / "start", *options, "trainer.max_steps=1")
    assert one.train_loss < start.train_loss - 0.1


def test_each_rank_writes_half_and_other_commands_read_it_in_one_process(run_of: Any) -> None:
    """Half of the weights, their averages and the optimizer's state, beside what torch.save adds.

    Accuracy counts; the loss of 180 samples is rounded in another order than by two ranks.
    """
    folder = run_of(*DIVIDED)
    files = {own.name: own.stat().st_size for own in checkpoint.newest(folder).iterdir()}
    parts = ["parts_00000.pt", "parts_00001.pt"]
    assert sorted(files) == ["config.yaml", "manifest.json", *parts, "state.pt"]
    average = checkpoint.load(folder)["trainer"]["ema"]
    divided = 4 * 4 * sum(weight.numel() for weight in average.values())
    assert all(divided / 2 < files[name] < divided / 2 + 2**13 for name in parts)
    summary, measured = summary_in(folder), evaluate(folder, []).evaluation
    assert measured.metrics["accuracy"] == summary["test_accuracy"]
    assert measured.loss == pytest.approx(summary["test_loss"], rel=64 * 2**-24)


def order_of(batch: int) -> list[int]:
    """The samples of a batch of the first epoch: rank 0's part, and then rank 1's."""
    order: list[int] = Loader(ranked.rows(32), 8, shuffle=True).batch_ids(0, batch).tolist()
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


def test_ranks_that_begin_or_drift_apart_are_refused(two: Ranks, tmp_path: Path) -> None:
    """Before the first step, or at the next checkpoint."""
    own = [*OWN[:4], "model._target_=ranked.seeded_otherwise"]
    options = [
        [*own, f"dtype={SHARDED}", f"trainer.parallel={parallel}"] for parallel in ("ddp", "fsdp")
    ]
    for ends in two(ranked.runs, tmp_path / "run", options):
        for kind, said in ends:
            assert kind == "UserCodeError"
            assert "weight is not the same on rank 1 as on rank 0 before the first" in said
    ends = two(ranked.run, tmp_path / "later", *OWN, "+callbacks.drift._target_=ranked.Drift")
    said = "trainer.parallel=ddp: after step 4 weight is not the same on rank 1 as on rank 0"
    assert all(text.startswith(said) for _, text in ends)
    assert not checkpoint.all_in(tmp_path / "later")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_autopsy_names_the_sample_of_any_rank(
    two: Ranks, tmp_path: Path, parallel: str
) -> None:
    """Ranks that divide the weights keep whole ones, for a command to examine."""
    overflow = ["callbacks.overflow._target_=ranked.Overflow", "trainer.max_consecutive_skips=2"]
    options = [*OWN, "dtype=amp", "loss_scaling=static", f"+{overflow[0]}", overflow[1]]
    first, second = two(ranked.run, tmp_path / "run", *options, f"trainer.parallel={parallel}")
    assert first == second
    assert first[0] == "DivergedError"
    path = Path(first[1].partition("; see ")[2])
    folder = path if parallel == "fsdp" else path.parent
    batch = int(folder.name.removeprefix("step_")) - 1
    trusted = [word for word in OWN if "_target_" in word]
    text = of_evidence(folder, trusted).markdown() if parallel == "fsdp" else path.read_text()
    assert f"epoch 0, batch {batch}, rank 1" in text
    assert ", ".join(map(str, order_of(batch)[4:])) in text
    assert "loss_scaling=static loss_scaling.scale=0.5; or" in text  # 1 is finite


def test_what_ranks_cannot_do_and_other_options_are_refused(two: Ranks, tmp_path: Path) -> None:
    """However the option would be noticed later. Where a rank finds its data is its own affair."""
    ends = two(ranked.runs, tmp_path / "refused", [[*OWN, option] for option in REFUSED])
    said = [("ConfigError", f"{option}: {text}") for option, text in REFUSED.items()]
    assert ends == [said, said]
    options = [[own] for own in OTHERWISE]
    ends = two(ranked.runs_otherwise, tmp_path / "run", OWN, options, within=90)
    assert ends[0] == ends[1]
    for (kind, text), otherwise in zip(ends[0], OTHERWISE.values(), strict=True):
        assert kind == "ConfigError"
        assert text.startswith(f"{otherwise}; start all ranks with the same")
    assert {p.name for p in (tmp_path / "run").rglob("*") if p.is_file()} == {".lock"}
    options = [["trainer.timeout=9", "run_name=later"]]
    for (end,) in two(ranked.runs_otherwise, tmp_path / "other", OWN, options):
        assert (end.status, end.steps) == (Status.FINISHED, 4)


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    with Ranks(2) as own:
        options = [*trouble(1, 2, "SIGKILL"), "trainer.timeout=300", f"dtype={SHARDED}"]
        own.begin(ranked.run, tmp_path, *OWN, "trainer.reduce=in_backward", *options)
        own.processes[1].join(60)
        began = time.monotonic()
        kind, said = own.results_of(0)
        assert time.monotonic() - began < 15
    assert kind == "LostRankError"
    assert said.startswith("rank 1: was killed, or gave no answer for 300 s")
    summary = summary_in(tmp_path)
    assert (summary["status"], summary["reason"]) == ("failed", said)


STREAM = ["dataset=own", "dataset._target_=ranked.stream", "dataset.batch_size=4", "model=own",
          "model._target_=torch.nn.Linear", "+model.in_features=1", "+model.out_features=1",
          "trainer.max_steps=12", "trainer.epochs=9", "trainer.checkpoint_every=1",
          "trainer.keep_last=9"]  # fmt: skip


def test_ranks_divide_a_stream_and_go_on_where_each_stood(two: Ranks, tmp_path: Path) -> None:
    (count, *first), (as_many, *second) = two(ranked.read_stream)
    assert count == as_many
    assert sorted(first + second) == list(range(33))
    two(ranked.run, tmp_path / "whole", *STREAM)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 5)
    two(ranked.run, resumed, *STREAM, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    with pytest.raises(
        CheckpointError, match=r"ranks=1: the stream was read with 2; start 2 processes"
    ):
        train(tmp_path / "one", *STREAM, f"resume={tmp_path / 'whole'}")
