"""What the doctor reports: one line each, with the command-line words that fix it."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is; the worst comes first."""

    ERROR = 0
    """The run will fail, or its numbers will be wrong."""
    WARNING = 1
    """The run loses accuracy or time."""
    NOTE = 2
    """Good to know."""


@dataclass(frozen=True)
class Finding:
    """One thing that will go wrong.

    Attributes:
        severity: how bad it is.
        what: the option or the modules, its value, and the consequence; one line.
        fix: words for the command line; empty if no option helps.
    """

    severity: Severity
    what: str
    fix: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{self.severity.name.lower()}: {self.what}"
        return f"{line}; fix: {shlex.join(self.fix)}" if self.fix else line


def error(what: str, *fix: str) -> Finding:
    """A finding that makes the doctor end with exit code 1."""
    return Finding(Severity.ERROR, what, fix)


def warning(what: str, *fix: str) -> Finding:
    """A finding that costs accuracy or time."""
    return Finding(Severity.WARNING, what, fix)


def note(what: str, *fix: str) -> Finding:
    """A finding that is good to know."""
    return Finding(Severity.NOTE, what, fix)


def few(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more
