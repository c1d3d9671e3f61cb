"""Runs in processes of their own, to be signalled and killed, from a server with torch loaded."""

import logging
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fork_server import CONTEXT, as_a_new_program
from in_process import train

from mpframe.core.errors import MpframeError


def forked(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A new process that calls a function."""
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def start(folder: Path, *options: str) -> BaseProcess:
    """Train in a new process; it logs to `folder/train.log` and exits as the program would."""
    return forked(_train, folder, options)


def finished(folder: Path, *options: str, within: float = 300) -> int:
    """Train in a new process to its end; its exit code."""
    return exit_code(start(folder, *options), within)


def exit_code(process: BaseProcess, within: float = 60) -> int:
    """The exit code of a process that ends within so many seconds."""
    process.join(within)
    assert process.exitcode is not None, f"process {process.pid} has not ended in {within} s"
    return process.exitcode


def wait_until(holds: Callable[[], object], process: BaseProcess, within: float = 60) -> bool:
    """Wait until something holds; False where the process ended before."""
    limit = time.monotonic() + within
    while not holds():
        if not process.is_alive():
            return False
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.002)
    return True


def training(folder: Path) -> bool:
    """True as soon as a run has begun to write its curves."""
    return any(folder.glob("events.out.*"))


def saving(folder: Path) -> bool:
    """True while a checkpoint is being written."""
    return any(folder.glob("checkpoints/.step_*.new"))


def _train(folder: Path, options: tuple[str, ...]) -> None:
    as_a_new_program()
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=folder / "train.log", level=logging.INFO)
    try:
        train(folder, *options)
    except MpframeError as error:
        logging.error("mpframe: %s", error)
        sys.exit(error.exit_code)
