"""What every command does first and last, and how it takes its own options."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from mpframe.config.redaction import hide, secrets_of
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError, nearest
from mpframe.files.text import one_line_exit, take_options, unreachable_in_one_line


def command(body: Callable[[list[str]], int | None]) -> Callable[..., None]:
    """Make a function of words a command; it takes the command line's if it is given none.

    An exit code that the function returns ends the program.
    """

    @wraps(body)
    def main(arguments: list[str] | None = None) -> None:
        with _program():
            code = body(sys.argv[1:] if arguments is None else arguments)
        if code is not None:
            sys.exit(code)

    return main


@contextmanager
def _program() -> Iterator[None]:
    """Make a user's code importable, and end an error in one line.

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
    """Write `***` in the place of each secret of the environment, and of those `words` refer to."""
    return hide(text, secrets_of([*sys.argv, *words], os.environ))


def current_folder_importable(folder: str | None = None) -> None:
    """Make `model._target_=my_model.Net` find my_model.py in the current folder.

    The folder goes last: a file in it never takes the place of a module that is installed. It is
    the folder the user works in, never one that a checkpoint names. A launcher that starts jobs
    elsewhere names it.
    """
    path = folder or os.getcwd()
    if path not in sys.path:
        sys.path.append(path)


def refuse_words(words: Iterable[str], known: Iterable[str]) -> None:
    """Refuse words that are none of the options that a command knows."""
    for word in words:
        hint = nearest(word.partition("=")[0], known) or "known: " + ", ".join(known)
        raise ConfigError(f"{word}: no such option; {hint}")


def take_own(
    arguments: list[str],
    names: Iterable[str],
    needed: str = "",
    choices: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Separate a command's own options from the other words.

    Args:
        names: of its options.
        needed: the option that names a run, without which the command cannot begin.
        choices: the values of the options that have only some.
    """
    options, rest = take_options(arguments, names)
    if needed and not options.get(needed):
        raise ConfigError(f"{needed}: must be given, e.g. {needed}=runs/2026-11-21/05-45-42")
    for name, known in (choices or {}).items():
        refuse_unknown(name, options.get(name), known)
    return options, rest


def refuse_unknown(option: str, value: str | None, known: Sequence[str]) -> None:
    """Refuse a value of an option that is not among the known ones; None is no value."""
    if value is not None and value not in known:
        hint = nearest(value, known)
        raise ConfigError(f"{option}={value}: choose {', '.join(known)}" + f"; {hint}" * bool(hint))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Refuse `out=` in one line if the block cannot write it."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); choose another"
        raise ConfigError(f"out={out}: {reason}") from error
