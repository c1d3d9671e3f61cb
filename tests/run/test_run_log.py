"""What a run says: on the console, in train.log and in the bar, and in its summary."""

import logging
import os
import re
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures import Log, Patch, Shown, refused
from in_process import HYDRA, command, composed, csv_rows, train
from omegaconf import DictConfig
from processes import as_a_new_program, exit_code, forked
from tqdm import tqdm

from mpframe import checkpoint
from mpframe.config.command_line import check_config
from mpframe.core.errors import DivergedError, UserCodeError
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import console

SMALL = ["model=mlp", "model.hidden=8", "dtype=amp", "trainer.epochs=1", "trainer.eval_every=11"]
NUMBER = r"[\d.e+-]+"
VALIDATION = (
    rf"epoch ([\d.]+), step (\d+)/22: train loss {NUMBER}, val loss {NUMBER}, "
    rf"accuracy 0\.\d{{4}} \(best(?: 0\.\d{{4}} at step \d+)?\), lr {NUMBER}, scale 65536, "
    r"0 skipped(?:, \d\d:\d\d left)?"
)
PLACES = [("0.5", "11"), ("1", "22")]


def places(lines: list[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := re.fullmatch(VALIDATION, line))]


def run(folder: Path, *overrides: str) -> tuple[Summary, list[str]]:
    """A run and its log's messages; the root logger writes to stderr, where the bar is, too."""
    root = logging.getLogger()
    folder.mkdir(parents=True, exist_ok=True)
    own = composed(*SMALL, *overrides)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(root, "handlers", [logging.StreamHandler(sys.stderr)])
        patched.setattr(root, "level", logging.INFO)
        summary = Run(check_config(own), own, folder, DictConfig(HYDRA)).train()
    lines = (folder / "train.log").read_text().splitlines()
    return summary, [line.rpartition("] ")[2] for line in lines]


@pytest.mark.parametrize("verbosity", ["quiet", "normal", "verbose"])
def test_what_a_console_shows_and_a_log_has(tmp_path: Path, capsys: Shown, verbosity: str) -> None:
    summary, logged = run(tmp_path, f"trainer.verbosity={verbosity}")
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("finished: ")
    assert f"val_accuracy {summary.val_metric:.4f}, 22 steps" in shown[-1]
    assert places(logged) == PLACES
    steps = [line for line in logged if re.match(r"epoch [\d.]+, step \d+/22: loss ", line)]
    if verbosity == "quiet":
        assert len(shown) == 1  # No terminal: no bar.
    else:
        assert (places(shown), set(steps) <= set(shown)) == (PLACES, True)
    assert len(steps) == (2 if verbosity == "verbose" else 0)
    assert logging.getLogger("mpframe").level == logging.NOTSET


def test_a_line_is_above_a_bar_not_in_it(tmp_path: Path, capsys: Shown, monkeypatch: Patch) -> None:
    """The bar is drawn at every step here."""
    at_once = partialmethod(tqdm.__init__, mininterval=0, miniters=1)
    monkeypatch.setattr(console, "tqdm", type("Bar", (tqdm,), {"__init__": at_once}))
    run(tmp_path, "callbacks.progress_bar.shown=on")
    output = capsys.readouterr().err
    assert "step/s" in output
    # A bar is drawn and taken away by `\r`; what is left of a line is behind the last one.
    left = [line.rpartition("\r")[2] for line in output.split("\n")]
    assert [line[:8] for line in left if "val loss" in line] == ["epoch 0.", "epoch 1,"]


def test_quiet_is_barless_on_a_terminal(tmp_path: Path, capsys: Shown, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for verbosity in ("quiet", "normal"):
        run(tmp_path / verbosity, "trainer.max_steps=2", f"trainer.verbosity={verbosity}")
        assert ("step/s" in capsys.readouterr().err) is (verbosity == "normal")


@pytest.mark.parametrize("dtype", ["mixed", "fp32"])  # In fp32 they are small, and no zeros.
def test_gradients_that_are_all_0_are_said_once(tmp_path: Path, dtype: str) -> None:
    options = ["objective=own", "objective._target_=planted.faint", "loss_scaling=static"]
    options += ["loss_scaling.scale=1", "trainer.verbosity=verbose", "trainer.log_every=5"]
    _, logged = run(tmp_path, *options, f"dtype={dtype}")
    said = "warning: all gradients of step 5 are 0, and nothing is learnt; mpframe doctor with the"
    found = [line.startswith(said) for line in logged if "all gradients" in line]
    assert found == [True] * (dtype == "mixed")


def _train_without_a_reader(folder: Path) -> None:
    as_a_new_program()
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    os.chdir(folder)
    sys.exit(command(*SMALL, "callbacks.progress_bar.shown=on", "hydra.run.dir=run"))


def test_a_reader_of_stderr_that_has_gone_does_not_end_the_run(tmp_path: Path) -> None:
    assert exit_code(forked(_train_without_a_reader, tmp_path)) == 0
    assert Summary.read(tmp_path / "run").status == "finished"


def test_the_time_left_is_that_of_the_steps_of_this_start(monkeypatch: Patch) -> None:
    now, lines = [0.0], console.LogLines(1)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    plan, progress = SimpleNamespace(steps_left=lambda *_: 10), SimpleNamespace(global_step=90)
    trainer: Any = SimpleNamespace(progress=progress, plan=plan)
    lines.setup(trainer, SimpleNamespace(train=[0]))
    assert lines._time_left(trainer) is None
    progress.global_step, now[0] = 91, 6.0
    assert lines._time_left(trainer) == "01:00"


FP32 = ["model=mlp", "model.hidden=8", "dtype=fp32"]
LINEAR = ["model._target_=erring.linear", "dtype=fp32"]


def test_times_and_counts_add_up_over_resumes(tmp_path: Path) -> None:
    first = train(tmp_path, *FP32, "trainer.epochs=1", "trainer.accumulate=4")
    before = checkpoint.read(tmp_path).state["callbacks"]["throughput"]["seconds"]
    second = train(tmp_path, *FP32, "trainer.epochs=2", "trainer.accumulate=4", "resume=auto")
    assert (first.steps, second.steps, second.epochs) == (6, 12, 2)
    assert (first.samples, second.samples) == (22 * 64, 44 * 64)  # A partial window counts, too.
    assert second.seconds > before  # which is up to the last checkpoint: the end is not counted
    assert (first.train_seconds or 1e9) < (second.train_seconds or 0.0) < second.seconds
    assert second.samples_per_second == second.samples / (second.train_seconds or 0.0)
    assert second.median_step_seconds is not None
    # A finished job that is started again keeps its time, up to the last checkpoint: what came
    # behind it is the writing of the end.
    saved = checkpoint.read(tmp_path).state["callbacks"]["throughput"]["seconds"]
    again = train(tmp_path, *FP32, "trainer.epochs=2", "trainer.accumulate=4", "resume=auto")
    times = (saved, second.train_seconds, second.samples_per_second)
    assert (again.seconds, again.train_seconds, again.samples_per_second) == times


@pytest.mark.parametrize(("options", "cause"), [
    (["model=mlp", "dtype=mixed", "loss_scaling=static", "loss_scaling.scale=1073741824"],
     "the loss is finite and its gradients overflow at scale 1.07374e+09: lower loss_scaling.scale "
     "or pin the overflowing module to fp32 in ops.modules"),
    ([*LINEAR, "dataset._target_=erring.nan_after", "dataset.batches=0"],
     "the loss itself is not finite, so scaling cannot help: lower optimizer.lr, look at the data, "
     "or pin the overflowing module to fp32 in ops.modules"),
])  # fmt: skip
def test_a_run_with_no_step_is_diverged(tmp_path: Path, options: list[str], cause: str) -> None:
    """An epoch has fewer steps than the guard against endless skips waits for."""
    words = [*options, "trainer.epochs=1", "callbacks.autopsy=null"]
    said = refused(DivergedError, train, tmp_path, *words)
    assert said == f"no step was applied, 22 were skipped: {cause}"
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps, summary.skipped_steps) == ("diverged", 0, 22)
    assert summary.reason == said
    assert not checkpoint.all_in(tmp_path)


@pytest.mark.parametrize("scaler", ["Backoff", "LogMax"])
def test_a_first_search_cut_off_is_no_divergence(tmp_path: Path, caplog: Log, scaler: str) -> None:
    """The scale goes down from 65536, and would fit after ten steps; its floor is 1."""
    options = ["model._target_=planted.Steep", "dtype=mixed", f"loss_scaling={scaler}"]
    short = [*options, "dataset.batch_size=512", "trainer.epochs=1", "callbacks.autopsy=null"]
    done = train(tmp_path / "ended", *short)
    assert (done.status, done.steps, done.skipped_steps) == ("finished", 0, 2)
    said = "0 steps applied, 2 skipped: most of the run was in vain; start"
    assert str(done.reason).startswith(said)
    assert f"warning: {done.reason}" in caplog.messages
    limited = [*short, "trainer.max_consecutive_skips=2"]
    assert refused(DivergedError, train, tmp_path / "limited", *limited) == (
        "trainer.max_consecutive_skips=2 reached: the loss is finite and its gradients overflow at "
        "scale 32768, from where it still goes down: lower loss_scaling.init_scale"
    )


def test_a_run_that_ended_in_skips_or_a_closure_at_nan_is_diverged(tmp_path: Path) -> None:
    options = [*LINEAR, "dataset._target_=erring.nan_after", "trainer.epochs=1"]
    said = "^the last 2 steps were skipped: the loss itself is not finite"
    with pytest.raises(DivergedError, match=said):
        train(tmp_path / "two", *options, "dataset.batches=20", "callbacks.autopsy=null")
    assert Summary.read(tmp_path / "two").status == "diverged"
    # A single one may be a scaler's try at a higher scale.
    assert train(tmp_path / "one", *options, "dataset.batches=21").status == "finished"
    # An optimizer that evaluates the loss itself skips nothing.
    options += ["dataset.batches=5", "trainer.max_steps=5", "scheduler=none"]
    lbfgs = ["optimizer._target_=torch.optim.LBFGS", "optimizer.max_iter=2"]
    with pytest.raises(DivergedError, match=r"^the last step was applied at a loss that is not"):
        train(tmp_path / "closure", *options, *lbfgs)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_best(tmp_path: Path) -> None:
    """Whether the best value lies before the checkpoint that the run goes on from, or behind it."""
    options = [*FP32, "scheduler=none", "optimizer.lr=0.1", "trainer.max_steps=40"]
    options += ["trainer.eval_every=4", "trainer.checkpoint_every=6"]
    whole = train(tmp_path / "whole", *options)
    rows = csv_rows(tmp_path / "whole" / "metrics.csv")
    seen = {int(row["step"]): float(row["val_accuracy"]) for row in rows if row["val_loss"]}
    assert whole.best_step == max(seen, key=lambda step: seen[step]) == 32
    assert f"{whole.best:.9g}" == f"{seen[32]:.9g}"
    for stop in (17, 37):
        breaks = ["+callbacks.bad._target_=own_parts.Breaks", f"+callbacks.bad.step={stop}"]
        with pytest.raises(UserCodeError):
            train(tmp_path / str(stop), *options, *breaks)
        assert (Summary.read(tmp_path / str(stop)).best_step == 32) is (stop == 37)
        resumed = train(tmp_path / str(stop), *options, "resume=auto")
        assert (resumed.best, resumed.best_step) == (whole.best, 32)
