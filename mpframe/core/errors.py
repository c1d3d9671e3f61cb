"""Errors that a user can fix, in one line: the option, its value, what is allowed, the way out."""

import difflib
import signal
from collections.abc import Iterable

_NEAR = 0.5  # The least likeness of a name that is suggested.
_AS_NEAR = 0.85  # The same, as a share of the nearest name's likeness.
_LONGEST = 1000  # In characters. Comparing takes their number squared.
_PART = 0.75  # The likeness of a name that contains the word, about as for a typing error.


class MpframeError(Exception):
    """Something the user can fix. Its text is one line and names the way out."""

    exit_code = 1  # of the program


class ConfigError(MpframeError):
    """An option is unknown, of the wrong type, or out of its range."""


class DataError(MpframeError):
    """Data is missing, malformed or insufficient, or holds NaN or inf."""


class UserCodeError(MpframeError):
    """A user's dataset, model, loss, metric or optimizer raised, or returned something unusable."""

    row: tuple[int, int] | None = None
    """The index of the sample to blame, and the batch's size, if they are known."""


class CheckpointError(MpframeError):
    """A checkpoint is missing, damaged, or made for something else."""


class DivergedError(MpframeError):
    """The run cannot go on: the loss or the gradients stay non-finite."""


class LostRankError(MpframeError):
    """Another rank, whose number begins the text, has ended or does not answer."""


class RunInterrupted(MpframeError):  # noqa: N818 - it is the way out of the loop, not an error
    """A signal stopped the run. It ends with 128 + the signal's number, as in a shell."""

    def __init__(self, received: signal.Signals, advice: str = "") -> None:
        super().__init__(f"stopped by {received.name}" + (f"; {advice}" if advice else ""))
        self.received, self.exit_code = received, 128 + received


def nearest(name: str, known: Iterable[str], count: int = 3, before: str = "") -> str:
    """Return `before` and the nearest known names, e.g. `; nearest: matmul`, or an empty text."""
    if len(name) > _LONGEST:
        return ""
    alike = {other: _compare(name.lower(), other.lower()) for other in known}
    least = max(_NEAR, _AS_NEAR * max(alike.values(), default=0.0))
    ranked = sorted(alike, key=lambda other: -alike[other])
    near = [other for other in ranked if alike[other] >= least][:count]
    return f"{before}nearest: {', '.join(near)}" if near else ""


def _compare(name: str, other: str) -> float:
    """Return how alike two names are, 0 to 1, without the sections that both begin with."""
    names, others = name.split("."), other.split(".")
    while names and others and names[0] == others[0]:
        del names[0], others[0]
    alike = difflib.SequenceMatcher(None, ".".join(names), ".".join(others)).ratio()
    return max(alike, _PART) if name and name in other else alike


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if there is no text.

    The second line follows if the first ends in a colon.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
