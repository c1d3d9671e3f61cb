"""Runs of several ranks: one run folder, the numbers of one process, and one end for all."""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from checkout import HELPERS, ROOT
from in_process import train
from ranks import Ranks, ranks
from sameness import differing, results
from torch import Tensor

from mpframe import checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
from mpframe.cli.commands.train import of_this_rank
from mpframe.core.errors import ConfigError
from mpframe.data import Loader
from mpframe.lab.ranges import read_ranges
from mpframe.tracking.summary import Status

NET = ["model=mlp", "model.hidden=16", "trainer.max_steps=8", "trainer.checkpoint_every=4"]
NOISY = [*NET, "model.hidden=32", "model.dropout=0.2", "dataset.augment=crop",
         "trainer.ema_decay=0.9", "dtype/products=nvfp4"]  # fmt: skip
OF_OTHERS = ("pymp-", "torchinductor_")
OWN = ["dataset=own", "dataset._target_=ranked.points", "dataset.batch_size=8", "model=own",
       "model._target_=torch.nn.Linear", "+model.in_features=4", "+model.out_features=2",
       "trainer.max_steps=4"]  # fmt: skip


def summary_in(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


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


def test_two_ranks_leave_the_folder_of_one_process(undisturbed: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", *NOISY)
    for_one = {re.sub(r"tfevents.*", "", p.name) for p in (tmp_path / "run").iterdir()}
    assert {re.sub(r"tfevents.*", "", p.name) for p in undisturbed.iterdir()} == for_one
    assert len(list(undisturbed.glob("events*"))) == 1
    assert not torch.equal(*generators_in(undisturbed))
    own, other = (
        json.loads((f / "summary.json").read_text()) for f in (undisturbed, tmp_path / "run")
    )
    assert own.keys() == other.keys()
    for name in ("steps", "epochs", "samples", "status"):
        assert own[name] == other[name]


def test_two_ranks_train_as_one_process_that_accumulates(two: Ranks, tmp_path: Path) -> None:
    first, second = two(ranked.run, tmp_path / "two", *NET)
    one = train(tmp_path / "one", *NET, "dataset.batch_size=32", "trainer.accumulate=2")
    states = [checkpoint.load(tmp_path / name)["trainer"] for name in ("two", "one")]
    assert not differing(states[0]["weights"], states[1]["weights"])
    assert not differing(states[0]["optimizer"], states[1]["optimizer"])
    assert not differing(states[0]["scaler"], states[1]["scaler"])
    assert first.train_loss == second.train_loss == one.train_loss
    # Accuracy counts, in whatever batches; the loss of 180 samples is rounded in another order,
    # each sum of at most 64 fp32 terms with a relative error below 64 * 2^-24.
    assert first.val_metric == second.val_metric == one.val_metric
    assert first.test_metrics == second.test_metrics == one.test_metrics
    assert first.val_loss == second.val_loss == pytest.approx(one.val_loss, rel=64 * 2**-24)


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_goes_on_exactly(
    two: Ranks, undisturbed: Path, tmp_path: Path
) -> None:
    stop = ["+callbacks.trouble._target_=ranked.Trouble", "+callbacks.trouble.rank=1",
            "+callbacks.trouble.step=5", "+callbacks.trouble.name=SIGTERM"]  # fmt: skip
    ends = two(ranked.run, tmp_path / "run", *NOISY, *stop)
    assert [kind for kind, _ in ends] == ["RunInterrupted", "RunInterrupted"]
    assert ends[0] == ends[1]
    assert f"continue with resume=auto hydra.run.dir={tmp_path}/run" in ends[0][1]
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("interrupted", 6)
    two(ranked.run, tmp_path / "run", *NOISY, "resume=auto")
    found = differing(results(undisturbed), results(tmp_path / "run"))
    assert [path for path in found if not path.startswith("/state/usage")] == []


def test_a_run_goes_on_with_another_number_of_ranks(
    two: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fewer, more = tmp_path / "fewer", tmp_path / "more"
    two(ranked.run, fewer, *NET, "trainer.max_steps=4")
    assert train(fewer, *NET, "resume=auto").steps == 8
    assert "world_size=1 (was 2)" in caplog.text
    train(more, *NET, "trainer.max_steps=4")
    first, _ = two(ranked.run, more, *NET, "resume=auto")
    assert first.steps == 8
    one, other = (checkpoint.load(folder)["trainer"]["weights"] for folder in (fewer, more))
    # Half a step of Adam apart at most: each moves a weight by about lr = 0.001.
    for name, own in one.items():
        assert (own - other[name]).abs().max() < 5e-4, name


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


def test_a_model_that_begins_otherwise_on_each_rank_is_refused(two: Ranks, tmp_path: Path) -> None:
    options = [
        "model._target_=ranked.seeded_otherwise",
        "~model.in_features",
        "~model.out_features",
    ]
    ends = two(ranked.run, tmp_path / "run", *OWN, *options)
    assert all(
        "weight is not the same on rank 1 as on rank 0 before the first" in s for _, s in ends
    )


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


SEVERAL = {
    "losses": ["experiment=digits_gan"],
    "optimizers": ["optimizer=muon_adamw", "model=mlp"],
    "frozen": ["callbacks=freeze", "+callbacks.freeze.steps={head.*: 1}", "model=mlp"],
    "frozen, in backward": ["callbacks=freeze", "+callbacks.freeze.steps={head.*: 1}", "model=mlp",
                            "trainer.reduce=in_backward", "dtype=amp"],
    "optimizers, in backward": ["optimizer=muon_adamw", "model=mlp", "dtype=mixed",
                                "trainer.reduce=in_backward", "trainer.recompute=[hidden*]"],
    "split": ["model=mlp", "dtype=mixed_bf16", "dtype.master_weights=split",
                       "trainer.ema_decay=0.9"],
}  # fmt: skip


def test_ranks_stay_the_same(two: Ranks, tmp_path: Path) -> None:
    """Checked at each checkpoint: several losses, several optimizers, layers frozen for a while."""
    short = ["trainer.max_steps=3", "trainer.checkpoint_every=1", "dataset.batch_size=32"]
    for summaries in two(ranked.runs, tmp_path, [[*own, *short] for own in SEVERAL.values()]):
        for name, own in zip(SEVERAL, summaries, strict=True):
            assert getattr(own, "status", own) is Status.FINISHED, name
            assert own.steps == 3, name


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
    "dtype=mixed_bf16": ("dtype.half=bfloat16", "float16"),
    "seed=1": ("seed=1", "0"),
    "optimizer=sgd": ("optimizer._target_=torch.optim.SGD", "torch.optim.AdamW"),
    "optimizer.lr=0.5": ("optimizer.lr=0.5", "0.003"),
    "model.out_features=3": ("model.out_features=3", "2"),
    "+model.bias=false": ("model.bias=False", "null"),
    "dataset.batch_size=4": ("dataset.batch_size=4", "8"),
    "trainer.accumulate=2": ("trainer.accumulate=2", "1"),
    "trainer.parallel=fsdp": ("trainer.parallel=fsdp", "null"),
    "trainer.parallel=none": ("trainer.parallel=none", "null"),
    "trainer.eval_every=1": ("trainer.eval_every=1", "null"),
    "trainer.clip_norm=1": ("trainer.clip_norm=1.0", "null"),
    "resume=auto": ("resume=auto", "none"),
    "ops.modules={weight:fp32}": ("ops.modules.weight=fp32", "null"),
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


def torchrun(*words: str, within: float = 240) -> subprocess.CompletedProcess[str]:
    """What the page tells to type: two ranks of scripts/train.py, and what they say."""
    flags = [word for word in words if word.startswith("--")]
    options = [word for word in words if not word.startswith("--")]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *flags]
    return subprocess.run(
        [*start, str(ROOT / "scripts" / "train.py"), *options],
        capture_output=True,
        text=True,
        timeout=within,
        cwd=HELPERS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def refusals(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of a program that refused to start, of all its ranks."""
    assert done.returncode == 1
    # Another rank says it if rank 0 comes to it seconds later, as it may on a busy machine.
    return re.findall(
        r"^mpframe: .*", re.sub(r"^mpframe: rank 1: ", "mpframe: ", done.stderr, flags=re.M), re.M
    )


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    done = torchrun("optimizer.lrr=7", f"hydra.run.dir={tmp_path}/run")
    assert refusals(done) == [
        "mpframe: optimizer.lrr: no such option; nearest: optimizer.lr; "
        "an argument of your own class: +optimizer.lrr=..."
    ]
    assert not (tmp_path / "run").exists()


def test_a_sweep_does_not_go_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^-m: torchrun has started 2 processes for one run"):
        of_this_rank(["-m", "seed=1,2"])
    assert of_this_rank(["seed=1"]) == ["seed=1", f"hydra.run.dir={tempfile.gettempdir()}"]


def test_nor_does_an_experiment_that_is_a_sweep(tmp_path: Path) -> None:
    done = torchrun("experiment=ladder_digits", f"hydra.sweep.dir={tmp_path}/sweep")
    assert refusals(done) == [
        "mpframe: hydra.mode=MULTIRUN: torchrun has started 2 processes for one run; start one "
        "torchrun for each job of the sweep"
    ]
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.storm
@pytest.mark.parametrize(
    "options", [NOISY, [*NET, *NOISY[-4:-1], "trainer.parallel=fsdp"]], ids=["ddp", "fsdp"]
)
def test_torchrun_starts_killed_ranks_again_and_the_run_comes_to_the_same(
    two: Ranks, tmp_path: Path, options: list[str]
) -> None:
    undisturbed = tmp_path / "undisturbed"
    two(ranked.run, undisturbed, *options)
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        kill = ["+callbacks.trouble._target_=ranked.Trouble", f"+callbacks.trouble.rank={rank}",
                "+callbacks.trouble.step=5", "+callbacks.trouble.name=SIGKILL"]  # fmt: skip
        kill += ["resume=auto", f"hydra.run.dir={folder}"]
        done = torchrun("--max-restarts=1", *options, *kill)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("finished: ") + done.stdout.count("finished: ") == 1
        found = differing(results(undisturbed), results(folder))
        assert [path for path in found if not path.startswith("/state/usage")] == []


def test_ddp_needs_several_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel=ddp: needs several processes"):
        train(tmp_path / "run", *OWN, "trainer.parallel=ddp")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("name", "timeout", "how"),
    [
        ("SIGKILL", 300, "trainer.reduce=in_backward"),
        ("SIGKILL", 300, "trainer.parallel=fsdp"),
        ("SIGSTOP", 3, "trainer.reduce=after_backward"),
    ],
)
def test_a_rank_that_is_killed_or_hangs_ends_the_others(
    tmp_path: Path, name: str, timeout: int, how: str
) -> None:
    """Also where torch's own collectives are met first, whose errors come out of the model."""
    trouble = ["+callbacks.trouble._target_=ranked.Trouble", "+callbacks.trouble.rank=1",
               "+callbacks.trouble.step=2", f"+callbacks.trouble.name={name}"]  # fmt: skip
    with ranks(2) as own:
        began = time.monotonic()
        options = [*trouble, f"trainer.timeout={timeout}", how]
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


def test_a_rank_0_that_hangs_is_named_where_it_keeps_the_store_itself(tmp_path: Path) -> None:
    """No agent of torchrun does; questions to the store have no end then."""
    trouble = ["+callbacks.trouble._target_=ranked.Trouble", "+callbacks.trouble.rank=0",
               "+callbacks.trouble.step=2", "+callbacks.trouble.name=SIGSTOP"]  # fmt: skip
    with ranks(2) as own:
        own.begin(ranked.run, tmp_path / "run", *OWN, *trouble, "trainer.timeout=3")
        kind, said = own.results_of(1)
        own.processes[0].kill()
    assert (kind, said) == (
        "LostRankError",
        "rank 0: was killed, or gave no answer for 3 s (trainer.timeout); continue with "
        "resume=auto",
    )


def test_numerics_count_the_samples_of_all_ranks(two: Ranks, tmp_path: Path) -> None:
    fast = ["callbacks.ranges.layers=[none]", "trainer.timeout=20"]
    two(ranked.run, tmp_path / "run", *OWN, "numerics=on", "numerics.every=4", *fast)
    (report,) = read_ranges(tmp_path / "run")
    assert report.field("activations", "count").tolist() == [8 * 2]  # samples, outputs
    assert report.field("weights", "count").tolist() == [4 * 2 + 2]
