"""Text for a terminal: printable lines, errors in one line, a program's own options, and tables.

The reader of a pipe may stop early, as `head` does. The program goes on, and its output is dropped.
"""

import errno
import logging
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from mpframe.core.errors import ConfigError, MpframeError

_UNREACHABLE = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


def printable(text: str, keep: str = "") -> str:
    """Write out control characters and line breaks, as in `\\x1b`, except those in `keep`."""
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in text
    )


def few(names: Iterable[str], shown: int = 3) -> str:
    """List the first names, and say how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more


@contextmanager
def unreachable_in_one_line() -> Iterator[None]:
    """Make one line of an OSError about a path that is too long, or may not be entered."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNREACHABLE or not isinstance(error.filename, str):
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}; name a path that you may enter, each name in it "
            "at most 255 bytes long"
        ) from error


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


class Console(logging.StreamHandler[TextIO]):
    """A log handler that stops showing lines, without a word, if their reader stops early."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if isinstance(sys.exception(), BrokenPipeError):
            drop_output(self.stream)
        else:
            super().handleError(record)


def say(text: str, end: str = "\n") -> None:
    """Print, even to a reader that stops early."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        drop_output(sys.stdout)


def drop_output(stream: TextIO) -> None:
    """Send what a stream still holds to nobody: Python writes the rest when it ends."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, stream.fileno())
    os.close(nobody)


def take_options(
    arguments: Iterable[str], names: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Separate the `name=value` words that a program knows (the last counts) from the others."""
    options, rest = {}, []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in names:
            options[name] = value
        else:
            rest.append(argument)
    return options, rest


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Pad the cells of each column to one width, right-aligned in the columns of `right`."""
    columns = [
        [cell.rjust(width) if number in right else cell.ljust(width) for cell in column]
        for number, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def markdown(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A Markdown table. A bar in a cell is escaped, and a line break becomes a space."""
    head, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *body))
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])
