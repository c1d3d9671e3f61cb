"""The command that continues a sweep that was stopped: the same one, with the sweep's folder."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from mpframe.config.composition.overrides import word_of
from mpframe.config.redaction import hide, secrets_of
from mpframe.console import printable
from mpframe.errors import RunInterrupted

_FOLDER = "hydra.sweep.dir"


def stopped(received: signal.Signals, folder: Path) -> RunInterrupted:
    """What is said of a sweep that a signal stopped.

    Args:
        received: the signal.
        folder: the sweep's.
    """
    return RunInterrupted(received, f"continue the sweep with: {command_again(folder)}")


def say_on_signal(folder: Path) -> None:
    """Let a signal end this process with that line, while its jobs run in other processes."""

    def end(number: int, frame: FrameType | None) -> None:
        error = stopped(signal.Signals(number), folder)
        said = hide(str(error), secrets_of(sys.argv, os.environ))
        print(f"mpframe: {printable(said)}", file=sys.stderr)
        sys.exit(error.exit_code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


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
