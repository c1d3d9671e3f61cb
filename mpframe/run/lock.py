"""One process per run folder: a lock that the kernel releases, however its process ends.

It is a POSIX record lock, which a forked data worker does not inherit. So the folder of a killed
run is free at once, even if its workers still run.
"""

import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from mpframe.errors import ConfigError, MpframeError
from mpframe.files.plain_file import open_regular

if sys.platform != "win32":  # Windows has no such lock.
    import fcntl

FILE_NAME = ".lock"


class RunLock:
    """Holds a run's folder within a `with` block.

    Args:
        folder: the run's folder; exists.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: another process holds it.
            MpframeError: the folder cannot be written.
        """
        try:
            self._file = open_regular(self._path, "a+")
            self._lock()
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        except OSError as error:
            raise MpframeError(
                f"hydra.run.dir={self._path.parent}: cannot be written ({error.strerror}); "
                "free space or choose another folder"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.truncate(0)  # It names who holds it: no process does now.
        self._file.close()

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read() or "another process"
            self._file.close()
            raise ConfigError(
                f"hydra.run.dir={self._path.parent}: {holder} is training in this folder; "
                "wait for it or choose another folder"
            ) from None
