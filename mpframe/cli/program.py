"""What every command does first and last."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from mpframe.config.redaction import hide, secrets_of
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError, nearest
from mpframe.files.text import one_line_exit, unreachable_in_one_line


@contextmanager
def program() -> Iterator[None]:
    """A command's body: a user's own code is importable, and an error ends in one line.

    No secret is in the line, and `sys.exit(0)` in a user's code is an error like any other.
    """
    current_folder_importable()
    with one_line_exit():
        try:
            with unreachable_in_one_line():
                yield
        except SystemExit as error:
            from mpframe.core.user_code import raised  # It imports torch.

            said = f"the command was ended by {raised(error)}; let it return"
            raise UserCodeError(said) from error
        except MpframeError as error:
            error.args = (without_secrets(str(error)),)
            raise


def without_secrets(text: str, words: Sequence[str] = ()) -> str:
    """What a command prints, with `***` in the place of each secret of the environment.

    Args:
        text: the text.
        words: the command line; a variable that it refers to is a secret, too.
    """
    return hide(text, secrets_of([*sys.argv, *words], os.environ))


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


def refuse_unknown(option: str, value: str | None, known: Sequence[str]) -> None:
    """Refuse a value of an option that is not among the known ones; None is no value."""
    if value is not None and value not in known:
        hint = nearest(value, known)
        raise ConfigError(f"{option}={value}: choose {', '.join(known)}" + f"; {hint}" * bool(hint))
