"""The process of a run: its memory, its console, and its job in Slurm's queue.

`mpframe.train` in a notebook leaves the process as it is.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from mpframe.config.schema import Config
from mpframe.run.parts import resolve_device
from mpframe.training.memory import keep_freed_memory

log = logging.getLogger(__name__)

RESULT = {"result": True}  # `extra` of the log line that says how a run ended, which `quiet` shows


def prepare_process(config: Config) -> None:
    """On a CPU, keep freed memory, but not if ranks divide a model because memory is short."""
    device, short = config.run.device, config.trainer.parallel == "fsdp"
    if not short and device in ("auto", "cpu") and resolve_device(device).type == "cpu":
        keep_freed_memory()


@contextmanager
def console(verbosity: str, rank: int = 0) -> Iterator[None]:
    """Context manager in which only rank 0's console shows anything, as much as `verbosity`."""

    def passes(record: logging.LogRecord) -> bool:
        loud = record.levelno >= logging.WARNING or hasattr(record, "result")
        return not rank and (loud or verbosity != "quiet")

    logger, known = logging.getLogger("mpframe"), logging.getLogger().handlers
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
