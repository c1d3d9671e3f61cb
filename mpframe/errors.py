"""Errors that a user can fix, in one line: the option, its value, what is allowed, the way out."""

import difflib
import errno
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

_NEAR = 0.5  # The least likeness of a name that is offered.
_AS_NEAR = 0.85  # Of the likeness of the nearest one: those that are offered beside it.
_LONGEST = 1000  # characters; comparing takes their number squared
_PART = 0.75  # The likeness of a name that has what was written as a part, as of a typing error.
_UNREACHABLE = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


class MpframeError(Exception):
    """Something the user can fix. Its text is one line and names the way out.

    Attributes:
        exit_code: what the program ends with.
    """

    exit_code = 1


class ConfigError(MpframeError):
    """An option is unknown, of the wrong type, or out of its range."""


class DataError(MpframeError):
    """Data is missing, malformed, too small, or holds NaN or inf."""


class UserCodeError(MpframeError):
    """A user's dataset, model, loss, metric or optimizer raised, or gave what nothing can use."""

    row: tuple[int, int] | None = None
    """The place in the batch of the sample to blame, and of how many; None if unknown."""


class CheckpointError(MpframeError):
    """A checkpoint is missing, damaged, or made for something else."""


class DivergedError(MpframeError):
    """The run cannot go on: the loss or the gradients stay non-finite."""


class LostRankError(MpframeError):
    """Another rank of the run has ended or does not answer; the text begins with its number."""


class RunInterrupted(MpframeError):  # noqa: N818 - it is the way out of the loop, not an error
    """A signal asked the run to stop; it ends with 128 + the signal's number, as in a shell.

    Args:
        received: the signal.
        advice: what to do next.
    """

    def __init__(self, received: signal.Signals, advice: str = "") -> None:
        super().__init__(f"stopped by {received.name}" + (f"; {advice}" if advice else ""))
        self.received = received
        self.exit_code = 128 + received


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A clause with the nearest known names, e.g. `nearest: matmul`; empty if none is near.

    Args:
        name: what the user wrote.
        known: the names that are allowed.
        count: how many names to offer at most.
    """
    if len(name) > _LONGEST:
        return ""
    alike = {other: _likeness(name.lower(), other.lower()) for other in known}
    least = max(_NEAR, _AS_NEAR * max(alike.values(), default=0.0))
    ranked = sorted(alike, key=lambda other: -alike[other])
    near = [other for other in ranked if alike[other] >= least][:count]
    return "nearest: " + ", ".join(near) if near else ""


def _likeness(name: str, other: str) -> float:
    """From 0 to 1; sections that both begin with do not count."""
    names, others = name.split("."), other.split(".")
    while names and others and names[0] == others[0]:
        del names[0], others[0]
    alike = difflib.SequenceMatcher(None, ".".join(names), ".".join(others)).ratio()
    return max(alike, _PART) if name and name in other else alike


def first_line(error: BaseException) -> str:
    """What an error says, in one line: its first, and the second if the first ends in a colon.

    If it says nothing, the name of its class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters and line breaks written out, as in `\\x1b`.

    Args:
        text: it may contain names from files or from users' classes.
        keep: characters that stay as they are, e.g. a line break.
    """
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


@contextmanager
def unreachable_in_one_line() -> Iterator[None]:
    """Give one line if a path cannot be reached: it is too long, or a folder may not be entered.

    Raises:
        ConfigError: the block raised an OSError of that kind.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNREACHABLE or not isinstance(error.filename, str):
            raise
        word = _word_with(Path(error.filename).absolute()) or error.filename
        raise ConfigError(
            f"{word}: {error.strerror}; name a path that you may enter, each name in it at most "
            "255 bytes long"
        ) from error


def _word_with(path: Path) -> str | None:
    """The word of the command line that names a path, or one above or below it."""
    words = {}
    for flag, word in pairwise(sys.argv):
        named = Path(word.partition("=")[2] or word).absolute()
        if path.is_relative_to(named) or named.is_relative_to(path):
            words[len(str(named))] = f"{flag} {word}" if flag.startswith("--") else word
    return words[max(words)] if words else None


@contextmanager
def one_line_exit() -> Iterator[None]:
    """End the program with exit code 1 and one line on stderr if the block raises MpframeError.

    `HYDRA_FULL_ERROR=1` lets the traceback through.
    """
    try:
        yield
    except MpframeError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"mpframe: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


def take_options(
    arguments: Iterable[str], names: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Separate a program's own `name=value` words from the others.

    Returns:
        The values by name (if a name is given twice, the last one), and the other words in order.
    """
    own, rest = {}, []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in names:
            own[name] = value
        else:
            rest.append(argument)
    return own, rest
