"""What every command does first and last."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mpframe.errors import ConfigError, nearest, one_line_exit


@contextmanager
def program() -> Iterator[None]:
    """A command's body: a user's own code is importable, and an error of ours ends in one line."""
    current_folder_importable()
    with one_line_exit():
        yield


def current_folder_importable(folder: str | None = None) -> None:
    """Let `model._target_=my_model.Net` find my_model.py in the current folder.

    The folder goes last: a file in it never takes the place of a module that is installed. It is
    the folder the user works in, never one that a checkpoint names.

    Args:
        folder: the current folder of the command, if a launcher starts jobs elsewhere.
    """
    path = folder or os.getcwd()
    if path not in sys.path:
        sys.path.append(path)


def refuse_words(words: Iterable[str], known: Iterable[str]) -> None:
    """Refuse words that are none of a command's options.

    Args:
        words: what is left of the command line.
        known: the names of the options there are.
    """
    for word in words:
        hint = nearest(word.partition("=")[0], known) or "known: " + ", ".join(known)
        raise ConfigError(f"{word}: no such option; {hint}")
