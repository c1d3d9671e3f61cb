"""Processes take turns: one after the other in a block of code that must not run twice at a time.

The kernel takes the lock back however a process ends, so nobody waits for one that was killed.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpframe.core.errors import MpframeError
from mpframe.files.plain_file import open_regular

if sys.platform != "win32":  # Windows has no such lock; there processes do not wait.
    import fcntl

log = logging.getLogger(__name__)

FILE_NAME = ".turn"


@contextmanager
def turn_in(folder: Path, waiting: str = "") -> Iterator[None]:
    """Wait until no other process is in a block over this folder; then run the block.

    `waiting` is logged if another process is there. MpframeError: the folder cannot be written, or
    its disk knows no locks.
    """
    path = folder / FILE_NAME
    try:
        file = open_regular(path, "a")
        if sys.platform != "win32":
            _lock(file.fileno(), waiting)
    except OSError as error:
        raise MpframeError(
            f"{path}: cannot be locked ({error.strerror}); free space, delete what is there or "
            "choose another folder"
        ) from None
    with file:  # Closing it gives the lock back.
        yield


def _lock(descriptor: int, waiting: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting:
            log.info(waiting)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
