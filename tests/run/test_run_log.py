"""What a run says while it goes on: on the console, in train.log, in the bar."""

import io
import logging
import os
import re
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures import Patch, Shown
from in_process import HYDRA, command, composed
from omegaconf import DictConfig
from processes import as_a_new_program, exit_code, forked
from tqdm import tqdm

from mpframe.config.command_line import check_config
from mpframe.run import description
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks import console
from mpframe.training.callbacks.results import Results
from mpframe.training.plan import Progress

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
    """The bar, drawn at every step here, shows the last validation and the best one."""
    at_once = partialmethod(tqdm.__init__, mininterval=0, miniters=1)
    monkeypatch.setattr(console, "tqdm", type("Bar", (tqdm,), {"__init__": at_once}))
    run(tmp_path, "callbacks.progress_bar.shown=on")
    output = capsys.readouterr().err
    assert "step/s" in output
    assert re.search(r"val_accuracy=(0\.\d{4}), best=\1", output)
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


@pytest.mark.parametrize("is_file", [True, False])
def test_a_bar_whose_stream_has_gone_is_drawn_no_more(
    is_file: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    plan = SimpleNamespace(steps_left=lambda *_: 4)
    trainer: Any = SimpleNamespace(progress=Progress(), plan=plan)
    context: Any = SimpleNamespace(results=Results(), train=[])
    bar = console.ProgressBar("on")
    # In a notebook stderr is no file.
    with (tmp_path / "stderr").open("w") if is_file else io.StringIO() as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        bar.setup(trainer, context)
        monkeypatch.setattr(bar._bar, "update", Mock(side_effect=BrokenPipeError))
        before = os.listdir("/dev/fd")
        bar.on_optimizer_step(trainer, Mock())
        assert (bar._bar.disable, os.listdir("/dev/fd")) == (True, before)
        bar.teardown(trainer, None)


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


def test_the_first_line_says_how_ranks_divide_the_work() -> None:
    grid = SimpleNamespace(replicas=2)
    for size, sharding, tensor, said in (
        (1, None, 1, ""),
        (2, None, 1, ", 2 ranks (ddp)"),
        (8, grid, 2, ", 8 ranks (fsdp, 2 replicas, layers divided by 2)"),
    ):
        comm: Any = SimpleNamespace(size=size, sharding=sharding, tensor=tensor)
        assert description._describe_ranks(comm) == said
