"""Locks on a folder: processes take turns in it, or a second one is refused.

The kernel releases a lock however its process ends, so nobody waits for a killed one. Windows has
no such lock, and processes do not wait there.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mpframe.core.errors import ConfigError, MpframeError
from mpframe.files.plain_file import open_regular

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)


@contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block over this folder, then run the block.

    MpframeError: the folder cannot be written, or its disk knows no locks.
    """
    path = folder / ".turn"
    try:
        file = open_regular(path, "a")
        if not _try_lock(file):
            log.info("waiting for another process in %s", folder)
            fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
        raise MpframeError(
            f"{path}: cannot be locked ({error.strerror}); free space, delete what is there or "
            "choose another folder"
        ) from None
    with file:  # Closing it gives the lock back.
        yield


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder for the block. ConfigError: another process holds it. Or OSError."""
    with open_regular(folder / ".lock", "a+") as file:
        if not _try_lock(file):
            file.seek(0)
            holder = file.read() or "another process"
            raise ConfigError(
                f"hydra.run.dir={folder}: {holder} is training in this folder; "
                "wait for it or choose another folder"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _try_lock(file: IO[Any]) -> bool:
    """Take the lock if no other process holds it."""
    if sys.platform != "win32":
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
