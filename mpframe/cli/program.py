"""The frame of every command: its options, and errors that end in one line."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from pathlib import Path

from mpframe.config.redaction import hide, secrets_of
from mpframe.config.schema import OPEN, RUN_OPTIONS, SECTIONS
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError, nearest
from mpframe.files.text import one_line_exit, take_options, unreachable_in_one_line


def command(body: Callable[[list[str]], int | None]) -> Callable[..., None]:
    """Make a function of words, which returns an exit code, a command over the command line.

    It finds the code of a user's folder, and ends an error in one line without secrets.
    """

    @wraps(body)
    def main(arguments: list[str] | None = None) -> None:
        current_folder_importable()
        with one_line_exit():
            try:
                with unreachable_in_one_line():
                    code = body(sys.argv[1:] if arguments is None else arguments)
            except SystemExit as error:  # In a user's code, an error like any other.
                from mpframe.core.user_code import describe_error  # It imports torch.

                said = f"the command was ended by {describe_error(error)}; let it return"
                raise UserCodeError(said) from error
            except MpframeError as error:
                error.args = (without_secrets(str(error)),)
                raise
        if code is not None:
            sys.exit(code)

    return main


def without_secrets(text: str, words: Sequence[str] = ()) -> str:
    """Write `***` for each secret of the environment or of variables that `words` refer to."""
    return hide(text, secrets_of([*sys.argv, *words]))


def current_folder_importable(folder: str | None = None) -> None:
    """Make `model._target_=my_model.Net` find my_model.py in the current folder.

    The folder goes last: a file in it never replaces an installed module. A launcher that starts
    jobs elsewhere names the `folder` the user works in. No checkpoint does.
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
    """Separate a command's options, by `names`, from the other words.

    `needed` is the option that names a run. `choices` has the values of options with a fixed set.
    """
    options, rest = take_options(arguments, names)
    for word in rest:
        name = word.partition("=")[0]
        meant = get_close_matches(name, [*names], 1, cutoff=0.8)
        if meant and name.partition(".")[0] not in {*SECTIONS, *OPEN, *RUN_OPTIONS}:
            raise ConfigError(f"{word}: no such option; nearest: {meant[0]}")
    if needed and not options.get(needed):
        there = next(filter(os.path.exists, rest), "runs/2026-11-21/05-45-42")
        raise ConfigError(f"{needed}: must be given, e.g. {needed}={there}")
    for name, known in (choices or {}).items():
        value = options.get(name, known[0])
        if value not in known:
            hint = nearest(value, known, before="; ")
            raise ConfigError(f"{name}={value}: choose {', '.join(known)}{hint}")
    return options, rest


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Refuse `out=` in one line if the block cannot write it."""
    try:
        yield
    except OSError as error:
        what = f"out={out}: cannot be written ({error.strerror})"
        raise ConfigError(f"{what}; choose another") from error
