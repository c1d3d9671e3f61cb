"""Writing so that after a crash a file has its old content or the new one, never a mixture.

A file is on the disk only after fsync, and its name only after fsync of its folder.
"""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mpframe.files.plain_file import open_regular

log = logging.getLogger(__name__)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one.

    A link at `path` is replaced; the file that it leads to is not changed. After an OSError `path`
    is as before and nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write in the block, which has its name only after it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _named(path):
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # `x`: a link that was placed there is not followed.
                yield file
                sync_file(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def append_whole(path: Path, piece: bytes) -> None:
    """Append a piece to a regular file, all of it or nothing; a missing file is created.

    OSError: there is no room, or it is a link; the file is as before.
    """
    with _named(path), open_regular(path, "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise


class AppendLog:
    """A file that grows by whole pieces; pieces for which the disk has no room wait in memory.

    `on_error`: `stop` raises if a piece cannot be written; `warn` writes it with the next one.
    """

    def __init__(self, path: Path, on_error: str = "stop") -> None:
        self._path = path
        self._warns = on_error == "warn"
        self._pending = b""

    @property
    def pending(self) -> bool:
        """Whether the last piece is not in the file."""
        return bool(self._pending)

    def append(self, piece: bytes) -> None:
        """Append a piece, after those that wait."""
        self._pending += piece
        try:
            append_whole(self._path, self._pending)
        except OSError as error:
            if not self._warns:
                raise
            log.warning("warning: %s cannot be written (%s)", self._path, error.strerror)
        else:
            self._pending = b""


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_paths(paths: Collection[Path]) -> None:
    """Wait until closed files, and their names, are on the disk; one that is gone is left out."""
    for path in paths:
        with suppress(FileNotFoundError), open_regular(path, "r+b") as file:
            os.fsync(file.fileno())
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the block: a full disk's error does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
