"""The process of a run: its memory and threads, its console, and its job in Slurm's queue.

`mpframe.train` in a notebook leaves the process as it is.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from mpframe.config.schema import Config
from mpframe.run.parts import resolve_device
from mpframe.training.memory import keep_freed_memory

_LOAD = Path("/proc/loadavg")


def advice_on_threads(threads: int, environment: Mapping[str, str]) -> str | None:
    """Return a line with the way out if threads are likely to fight for cores, else None."""
    if threads == 1 or environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return None
    usable = _usable_cores()
    free = max(1, min(usable, (os.cpu_count() or usable) - _busy_cores()))
    if threads <= free:
        return None
    return (
        f"torch computes with {threads} threads, and {free} of {usable} cores "
        f"{'is' if free == 1 else 'are'} free: threads that spin while they wait can make a step "
        f"many times slower; set OMP_NUM_THREADS={free} or OMP_WAIT_POLICY=PASSIVE"
    )


def _busy_cores() -> int:
    """Return how many cores others use: now, at most the last minute's load, 0 if unknown."""
    if not _LOAD.exists():
        return 0
    load, _, _, tasks, _ = _LOAD.read_text().split()
    running = int(tasks.partition("/")[0]) - 1  # Without this process.
    return int(min(float(load), running))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


log = logging.getLogger(__name__)


def prepare_process(config: Config) -> None:
    """On a CPU, keep freed memory and warn of threads without cores."""
    device = config.run.device
    if device not in ("auto", "cpu") or resolve_device(device).type != "cpu":
        return
    keep_freed_memory()
    advice = advice_on_threads(torch.get_num_threads(), os.environ)
    if advice is not None:
        log.warning("warning: %s", advice)


RESULT = {"result": True}
"""`extra` of the log line that says how a run ended, which `quiet` also shows."""


@contextmanager
def console(verbosity: str, rank: int = 0) -> Iterator[None]:
    """Context manager in which only rank 0's console shows anything, as much as `verbosity`."""

    def passes(record: logging.LogRecord) -> bool:
        loud = record.levelno >= logging.WARNING or hasattr(record, "result")
        return loud and not rank

    quiet = rank or verbosity == "quiet"
    logger, known = logging.getLogger("mpframe"), logging.getLogger().handlers if quiet else []
    handlers = [handler for handler in known if not isinstance(handler, logging.FileHandler)]
    before = logger.level
    for handler in handlers:
        handler.addFilter(passes)
    if verbosity == "verbose":
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in handlers:
            handler.removeFilter(passes)


def requeue(received: signal.Signals) -> None:
    """Ask Slurm to run this job again, if it sent SIGUSR1, its warning of the time limit."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or received.name != "SIGUSR1":
        return
    try:
        subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        log.warning("warning: job %s was not requeued: %s", job, said[0] if said else error)
    else:
        log.info("job %s requeued", job)
