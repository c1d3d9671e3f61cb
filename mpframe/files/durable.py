"""Writes a file so that after a crash it has its old content or the new one, never a mixture.

A file is on the disk only after fsync, and its name only after fsync of its folder.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mpframe.core.errors import ConfigError
from mpframe.files.plain_file import open_regular


def refuse_unwritable(option: str, folder: Path) -> None:
    """Refuse an output folder that cannot be written, before anything is computed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{option}={folder}: {existing} is a file; choose a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={folder}: {existing} cannot be written; choose another folder")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file of which a reader, or a crash, finds the old content or the new one.

    A link at `path` is replaced, and the file that it leads to is not changed. After an OSError
    `path` is as before and nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which gets its name when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _add_file_name(path):
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
    """Append a piece to a regular file, all of it or nothing. A missing file is created.

    OSError: there is no room, or it is a link. The file is as before.
    """
    with _add_file_name(path), open_regular(path, "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_paths(paths: Collection[Path]) -> None:
    """Wait until closed files and their names are on the disk. A missing file is ignored."""
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
def _add_file_name(path: Path) -> Iterator[None]:
    """Context manager that adds the file's name to an OSError, as for a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
