"""Writing so that a crash meets the old content or the new one, and never a mixture.

A file is on the disk only after fsync, and its name only after fsync of its folder.
"""

import os
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, text: str) -> None:
    """Put `text` at `path` so that a reader or a crash meets the old content or the new one.

    Raises:
        OSError: the folder cannot be written; `path` is as before and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            sync_file(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
