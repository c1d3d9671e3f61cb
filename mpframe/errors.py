"""Errors a user can mend, in one line: the option, its value, what is allowed, the way out."""

import difflib
from collections.abc import Iterable


class MpframeError(Exception):
    """Something the user can mend. Its text is one line and names the way out."""


class ConfigError(MpframeError):
    """An option is unknown, of the wrong type, or out of its range."""


class DataError(MpframeError):
    """Data is missing, malformed, too small, or holds NaN or inf."""


class CheckpointError(MpframeError):
    """A checkpoint is missing, damaged, or made for something else."""


class DivergedError(MpframeError):
    """The run cannot go on: the loss or the gradients stay non-finite."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A clause naming the closest known names, e.g. `nearest: matmul, mm`; empty where none is.

    Args:
        name: what the user wrote.
        known: the names that are allowed.
        count: how many names to offer at most.
    """
    known = list(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=count, cutoff=0.5)
    return "nearest: " + ", ".join(folded[match] for match in close) if close else ""
