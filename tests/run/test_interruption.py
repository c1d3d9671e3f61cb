"""A run that is stopped or killed: where it stops, what it leaves, and that it goes on exactly.

Storms: runs killed at random moments, saves included, come to the same as the undisturbed run.
`./dev all` runs the short storm, `pytest -m storm` the long one, over a checkpoint of more than 100
MB.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import Log, Patch, Shown
from in_process import assert_same_run, scalars, train, trained
from processes import exit_code, forked, saving, start, training, wait_until

from mpframe import checkpoint
from mpframe.core.errors import ConfigError, RunInterrupted
from mpframe.files.file_lock import run_lock
from mpframe.tracking.summary import Summary
from mpframe.training.interruption import Interruption

OPTIONS = ["model._target_=own_parts.MonteCarloNet", "dataset.augment=crop", "trainer.epochs=2"]
OPTIONS += ["trainer.max_steps=14", "trainer.eval_every=4", "trainer.log_every=1"]
OPTIONS += ["trainer.ema_decay=0.9", "optimizer.lr=0.01"]
SHORT = ["model=mlp", "model.hidden=8", "trainer.max_steps=3"]
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}


def send(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), signal.Signals[name])


def at_call(number: int, act: Callable[[], object], then: Any) -> Any:
    """`then`, with `act` before its call of that number."""
    calls = iter(range(1, 10_000))

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            act()
        return then(*arguments, **named)

    return called


def interrupted(
    folder: Path, *options: str, call: int, of: str = "on_step_end", name: str = "SIGTERM"
) -> RunInterrupted:
    """A run that is signalled before a call of the callback that looks for signals."""
    stop = at_call(call, lambda: send(name), getattr(Interruption, of))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Interruption, of, stop)
        with pytest.raises(RunInterrupted) as caught:
            train(folder, *options)
    return caught.value


whole = trained(*OPTIONS)


def test_a_signal_to_run_and_workers_stops_it_between_steps(whole: Path, tmp_path: Path) -> None:
    """A terminal signals all of them."""
    process = start(tmp_path, *OPTIONS, "dataset.workers=2")
    assert wait_until(lambda: training(tmp_path), process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    sent = time.monotonic()
    for pid in [*workers, process.pid]:
        os.kill(int(pid or 0), signal.SIGTERM)
    assert exit_code(process) == CODES["SIGTERM"]
    assert time.monotonic() - sent < 20
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.reason) == ("interrupted", "stopped by SIGTERM")
    assert checkpoint.read(tmp_path).global_step == summary.steps < 14
    train(tmp_path, *OPTIONS, "resume=auto")
    assert_same_run(whole, tmp_path)


@pytest.mark.parametrize("log_every", [1, 3])  # With 3, step 8 is not logged but by its validation.
def test_a_validation_is_abandoned_and_remade(whole: Path, tmp_path: Path, log_every: int) -> None:
    options = [*OPTIONS, f"trainer.log_every={log_every}"]
    # Three batches a validation: the fifth is in the middle of the second one, at step 8.
    interrupted(tmp_path, *options, call=5, of="on_prediction_step")
    progress = checkpoint.load(tmp_path)["trainer"]["progress"]
    assert (progress["steps"], progress["validated"]) == (8, 4)
    assert [step for step, _ in scalars(tmp_path)["loss/val"]] == [4]
    # Stopped again in the same validation: it is made, and written, once.
    interrupted(tmp_path, *options, "resume=auto", call=2, of="on_prediction_step")
    train(tmp_path, *options, "resume=auto")
    rows, same = ((run / "metrics.csv").read_text().splitlines() for run in (tmp_path, whole))
    assert [row for row in rows if row.startswith("8,")] == [same[8]]
    if log_every == 1:
        assert_same_run(whole, tmp_path)
        assert rows == same


def test_more_signals_tear_no_checkpoint(whole: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    again = at_call(1, lambda: list(map(send, CODES)), checkpoint.save)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", again)
        assert str(interrupted(tmp_path, *OPTIONS, call=5)).startswith("stopped by SIGTERM")
    train(tmp_path, *OPTIONS, "resume=auto")
    assert_same_run(whole, tmp_path)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: Patch) -> Path:
    """What a program of that name was asked for; it writes that down, and fails."""
    program, log = tmp_path / "bin" / "scontrol", tmp_path / "scontrol.log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"; echo "It may not be" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return log


@pytest.mark.parametrize(
    ("name", "requeue"), [("SIGUSR1", True), ("SIGUSR1", False), ("SIGINT", True)]
)
def test_only_the_warning_of_a_time_limit_requeues(
    tmp_path: Path, scontrol: Path, caplog: Log, capfd: Shown, name: str, requeue: bool
) -> None:
    options = [*SHORT, f"trainer.requeue={requeue}", "resume=auto"]
    stopped = interrupted(tmp_path / "run", *options, call=2, name=name)
    assert stopped.exit_code == CODES[name]
    assert capfd.readouterr().err == f"\n{name}: stopping after this step\n"
    asked = requeue and name == "SIGUSR1"
    assert ("warning: job 77 was not requeued: It may not be" in caplog.messages) is asked
    assert (scontrol.read_text() if scontrol.exists() else "") == "requeue 77\n" * asked
    assert checkpoint.read(tmp_path / "run").global_step == 2


def test_a_signal_while_the_model_is_imported_is_no_error_of_the_model(
    tmp_path: Path, monkeypatch: Patch, scontrol: Path
) -> None:
    text = "import os\ntry:\n    os.kill(os.getpid(), 10)\nexcept Exception as error:\n"
    (tmp_path / "signalled.py").write_text(f"{text}    raise ImportError('missing') from error\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["model._target_=signalled.net", "resume=auto", "trainer.requeue=true"]
    with pytest.raises(RunInterrupted, match=r"^stopped by SIGUSR1; continue with resume=auto"):
        train(tmp_path / "run", *options)
    assert Summary.read(tmp_path / "run").status == "interrupted"
    assert not checkpoint.all_in(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert scontrol.read_text() == "requeue 77\n"


def _hold(folder: Path) -> None:
    with run_lock(folder):
        (folder / "held").touch()
        time.sleep(60)


def test_a_second_process_on_a_run_folder_is_refused(tmp_path: Path) -> None:
    holder = forked(_hold, tmp_path)
    assert wait_until((tmp_path / "held").exists, holder)
    said = rf"^hydra\.run\.dir=\S+: process {holder.pid} on \S+ is training in this folder; wait"
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, *SHORT, "resume=auto")
    assert not (tmp_path / "config_resolved.yaml").exists()
    holder.kill()


def test_a_killed_run_frees_its_folder_and_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    """Its workers, who live on for some seconds, do not hold the lock."""
    options = [*OPTIONS, "trainer.checkpoint_every=3"]
    process = start(tmp_path, *options, "dataset.workers=2")
    assert wait_until(lambda: checkpoint.all_in(tmp_path), process)
    process.kill()
    exit_code(process)
    with run_lock(tmp_path):
        pass
    train(tmp_path, *options, "resume=auto")
    assert_same_run(whole, tmp_path)


STORMED = ["model=mlp", "model.dropout=0.1", "dataset.augment=crop", "dtype=mixed"]
STORMED += ["loss_scaling=LogMax", "trainer.ema_decay=0.9", "trainer.checkpoint_every=3"]
STORMED += ["trainer.eval_every=4", "trainer.max_steps=14", "trainer.log_every=1"]
STORMED += ["trainer.keep_best=1"]
SLOW = 300  # seconds, on a machine that is busy
STRIKES = {"SIGKILL": 30, "SIGTERM": 10}


class Storm:
    """An undisturbed run, and others that are struck at moments of a seed and must equal it."""

    def __init__(self, folder: Path, options: list[str], seed: int) -> None:
        self.folder, self.options, self.random = folder, options, random.Random(seed)
        self.whole = folder / "whole"
        process = start(self.whole, *options)
        assert wait_until(lambda: training(self.whole), process, SLOW)
        began = time.monotonic()
        assert exit_code(process, SLOW) == 0
        self.seconds = time.monotonic() - began

    def strike(self, number: int, name: str, *options: str) -> None:
        """Signal a run at a random moment, let it go on, and compare."""
        struck, expected = self.folder / f"{name}-{number}", {"SIGKILL": -9, "SIGTERM": 143}[name]
        # Every third time in a save, wherever in it that may be.
        while self._signalled(struck, name, number % 3 == 0, *options) != expected:
            shutil.rmtree(struck)  # It was over before its moment came.
        assert exit_code(start(struck, *self.options, *options, "resume=auto"), SLOW) == 0
        assert_same_run(self.whole, struck)
        shutil.rmtree(struck)

    def _signalled(self, struck: Path, name: str, in_save: bool, *options: str) -> int:
        process = start(struck, *self.options, *options)
        wait_until(lambda: training(struck), process, SLOW)
        time.sleep(self.random.uniform(0, 0.9 * self.seconds))
        if in_save and wait_until(lambda: saving(struck), process, SLOW):
            time.sleep(self.random.uniform(0, 0.02 * self.seconds))
        if process.is_alive():
            os.kill(process.pid or 0, signal.Signals[name])
        return exit_code(process, SLOW)


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    storm = Storm(tmp_path, [*STORMED, "model.hidden=64"], seed=1)
    for number in range(3):
        storm.strike(number, "SIGKILL", f"trainer.async_save={bool(number % 2)}")
    storm.strike(0, "SIGTERM")


@pytest.mark.storm
@pytest.mark.parametrize(("name", "strikes"), STRIKES.items())
def test_a_long_storm(tmp_path: Path, name: str, strikes: int) -> None:
    storm = Storm(tmp_path, [*STORMED, "model.hidden=2816"], seed=2)  # 130 MB
    assert (checkpoint.newest(storm.whole) / "state.pt").stat().st_size >= 100_000_000
    for number in range(strikes):
        storm.strike(number, name, f"trainer.async_save={bool(number % 2)}")
