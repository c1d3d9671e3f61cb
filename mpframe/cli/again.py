"""The command that goes on with a sweep that was stopped: the same one, with the sweep's folder."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mpframe.config.overrides import word_of

_FOLDER = "hydra.sweep.dir"


def command_again(folder: Path, arguments: Sequence[str] = ()) -> str:
    """The command line to copy into a shell, in the folder where it was given before.

    Args:
        folder: the sweep's.
        arguments: what the program was started with; empty: this process's own.
    """
    words = _as_typed([*arguments] or sys.orig_argv)
    words = [word for word in words if not word.startswith(f"{_FOLDER}=")]
    return shlex.join([*words, word_of(_FOLDER, str(folder))])


def _as_typed(words: list[str]) -> list[str]:
    """Without the Python that runs an installed program, which nobody types."""
    program = Path(words[1]) if len(words) > 1 else Path()
    if program.is_absolute() and shutil.which(program.name) == str(program):
        return [program.name, *words[2:]]
    return words
