"""A run that is asked to stop: where it stops, what it leaves, and that it goes on exactly."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from fixtures import Log, Patch
from in_process import scalars, train
from processes import exit_code, start, training, wait_until
from sameness import assert_same_run

from mpframe import checkpoint
from mpframe.core.errors import ConfigError, RunInterrupted
from mpframe.files.file_lock import run_lock
from mpframe.run.parts import build_loaders
from mpframe.tracking.summary import Summary
from mpframe.training.interruption import Interruption

OPTIONS = [
    "model._target_=noisy.NoisyNet", "dataset.augment=crop", "trainer.epochs=2",
    "trainer.max_steps=14", "trainer.eval_every=4", "trainer.log_every=1",
    "trainer.ema_decay=0.9", "optimizer.lr=0.01",
]  # fmt: skip
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *OPTIONS)
    return folder


def test_a_signal_stops_the_run_between_two_steps(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *OPTIONS)
    assert wait_until(lambda: training(folder), process)
    sent = time.monotonic()
    os.kill(process.pid or 0, signal.SIGTERM)
    assert exit_code(process) == CODES["SIGTERM"]
    assert time.monotonic() - sent < 20
    summary = Summary.read(folder)
    assert (summary.status, summary.reason) == ("interrupted", "stopped by SIGTERM")
    assert checkpoint.read(folder).global_step == summary.steps < 14
    train(folder, *OPTIONS, "resume=auto")
    assert_same_run(whole, folder)


@pytest.mark.parametrize("log_every", [1, 3])  # With 3, step 8 is not logged but by its validation.
def test_a_validation_is_abandoned_and_made_again(
    whole: Path, tmp_path: Path, log_every: int
) -> None:
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
    if log_every == 1:
        assert_same_run(whole, tmp_path)
        assert rows == same
    assert [row for row in rows if row.startswith("8,")] == [same[8]]


def test_further_signals_do_not_tear_the_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    again = at_call(1, lambda: list(map(send, CODES)), checkpoint.save)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", again)
        assert str(interrupted(tmp_path / "run", *OPTIONS, call=5)).startswith("stopped by SIGTERM")
    train(tmp_path / "run", *OPTIONS, "resume=auto")
    assert_same_run(whole, tmp_path / "run")


def test_before_there_is_anything_to_save_a_signal_stops_at_once(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("mpframe.run.run.build_loaders", at_call(1, send, build_loaders))
    with pytest.raises(RunInterrupted):
        train(tmp_path, *SHORT)
    assert Summary.read(tmp_path).status == "interrupted"
    assert not checkpoint.all_in(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_the_program_with_workers(tmp_path: Path) -> None:
    """The program itself, the leader of a process group, signalled as a terminal does it."""
    options = ["hydra.run.dir=run", "trainer.epochs=100", "dataset.workers=2", "model=mlp"]
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *options],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    limit = time.monotonic() + 60
    while not training(tmp_path / "run"):
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGTERM)
    _, said = program.communicate(timeout=20)
    assert program.returncode == CODES["SIGTERM"]
    assert said.splitlines() == [
        "",
        "SIGTERM: stopping after this step",
        f"mpframe: stopped by SIGTERM; continue with resume=auto hydra.run.dir={tmp_path / 'run'}",
    ]
    assert checkpoint.read(tmp_path / "run").global_step == Summary.read(tmp_path / "run").steps


def with_scontrol(folder: Path, monkeypatch: Patch) -> Path:
    """A program called scontrol that writes down what it was asked for, and fails."""
    program, log = folder / "bin" / "scontrol", folder / "scontrol.log"
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
    tmp_path: Path, monkeypatch: Patch, caplog: Log, name: str, requeue: bool
) -> None:
    log = with_scontrol(tmp_path, monkeypatch)
    options = [*SHORT, f"trainer.requeue={requeue}", "resume=auto"]
    stopped = interrupted(tmp_path / "run", *options, call=2, name=name)
    assert stopped.exit_code == CODES[name]
    asked = requeue and name == "SIGUSR1"
    assert log.exists() is asked
    refused = "warning: job 77 was not requeued: It may not be"
    assert (refused in caplog.messages) is asked
    assert not asked or log.read_text() == "requeue 77\n"
    assert checkpoint.read(tmp_path / "run").global_step == 2


def _hold(folder: Path, taken: Any, release: Any) -> None:
    with run_lock(folder):
        taken.set()
        release.wait(60)


def test_a_second_process_on_a_run_folder_is_refused(tmp_path: Path) -> None:
    forking = multiprocessing.get_context("fork")
    taken, release = forking.Event(), forking.Event()
    holder = forking.Process(target=_hold, args=(tmp_path, taken, release))
    holder.start()
    assert taken.wait(60)
    said = rf"^hydra\.run\.dir=\S+: process {holder.pid} on \S+ is training in this folder; wait"
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, *SHORT, "resume=auto")
    assert not (tmp_path / "config_resolved.yaml").exists()
    release.set()
    assert exit_code(holder) == 0


def test_a_killed_run_leaves_its_folder_free_at_once_and_goes_on_exactly(
    whole: Path, tmp_path: Path
) -> None:
    """Its workers, who live on for some seconds, do not hold the lock."""
    folder, options = tmp_path / "run", [*OPTIONS, "trainer.checkpoint_every=3"]
    process = start(folder, *options, "dataset.workers=2")
    assert wait_until(lambda: checkpoint.all_in(folder), process)
    os.kill(process.pid or 0, signal.SIGKILL)
    exit_code(process)
    with run_lock(folder):
        pass
    train(folder, *options, "resume=auto")
    assert_same_run(whole, folder)


SIGNALLED = """
import os, signal

try:
    os.kill(os.getpid(), signal.SIGUSR1)
except Exception as error:
    raise ImportError("optional part is missing") from error
"""


def test_a_signal_while_the_model_is_imported_is_no_error_of_the_model(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "signalled_model.py").write_text(SIGNALLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    log = with_scontrol(tmp_path, monkeypatch)
    options = ["model._target_=signalled_model.net", "resume=auto", "trainer.requeue=true"]
    with pytest.raises(RunInterrupted, match=r"^stopped by SIGUSR1; continue with resume=auto"):
        train(tmp_path / "run", *options)
    assert Summary.read(tmp_path / "run").status == "interrupted"
    assert log.read_text() == "requeue 77\n"
