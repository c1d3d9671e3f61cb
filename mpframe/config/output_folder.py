"""An output folder that could not be written is refused before anything is computed."""

import os
from pathlib import Path

from mpframe.core.errors import ConfigError


def refuse_unwritable(option: str, folder: Path) -> None:
    """Refuse an output folder that cannot be written, before anything is computed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{option}={folder}: {existing} is a file; choose a folder")
    if not os.access(existing, os.W_OK) or not _takes_files(existing):
        raise ConfigError(f"{option}={folder}: {existing} cannot be written; choose another folder")


def _takes_files(folder: Path) -> bool:
    probe = folder / f".write-probe-{os.getpid()}"
    try:
        probe.touch(exist_ok=False)  # A link planted there is not followed.
        probe.unlink()
    except OSError:
        return False
    return True
