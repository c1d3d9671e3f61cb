"""Processes from a server that has imported once what would take each of them its seconds.

There is one for each process of pytest: multiprocessing keeps it, and reads the names at its start.
"""

import atexit
import importlib.util
import json
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from mpframe.core.errors import MpframeError

SCRIPT = ROOT / "scripts" / "train.py"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "mpframe.run.run", "mpframe.cli.commands.train", "mpframe.data", "pytest",
    "mpframe.training.parallel.process_group",
    "torch._dynamo", "torch.distributed.fsdp",  # With the first step, of whatever model.
])  # fmt: skip


def as_a_new_program() -> None:
    """In a forked process: Python's own way to start others, as data workers, and not this one."""
    multiprocessing.set_start_method(None, force=True)


def forked(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def exit_code(process: BaseProcess, within: float = 60) -> int:
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


def start(folder: Path, *options: str) -> BaseProcess:
    """Train in a new process; it logs to `folder/train.log` and exits as the program would."""
    return forked(_train, folder, options)


def _train(folder: Path, options: tuple[str, ...]) -> None:
    from in_process import train  # Few tests need what it imports.

    as_a_new_program()
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=folder / "train.log", level=logging.INFO)
    try:
        train(folder, *options)
    except MpframeError as error:
        logging.error("mpframe: %s", error)
        sys.exit(error.exit_code)


def training(folder: Path) -> bool:
    return any(folder.glob("events.out.*"))


def saving(folder: Path) -> bool:
    return any(folder.glob("checkpoints/.step_*.new"))


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What `python scripts/train.py WORDS...` comes to in a folder."""
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("stdout", "stderr")]
        code = exit_code(forked(_program, folder, words, dict(os.environ), files), within=300)
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


def _program(folder: Path, words: tuple[str, ...], env: dict[str, str], files: list[Path]) -> None:
    as_a_new_program()
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env, HYDRA_FULL_ERROR="")
    sys.argv = [str(SCRIPT), *words]
    sys.orig_argv = [sys.executable, *sys.argv]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them.


def summaries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]


def statuses(folder: Path) -> dict[str, object]:
    """How the jobs of a sweep ended, by what was swept."""
    found = folder.glob("*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["status"] for path in found}


def plugin(name: str) -> pytest.MarkDecorator:
    """Skips where a plugin of Hydra is not installed."""
    find = importlib.util.find_spec
    there = find("hydra_plugins") and find(f"hydra_plugins.{name}")
    return pytest.mark.skipif(not there, reason=f"{name} is not installed; mpframe[sweep] has it")
