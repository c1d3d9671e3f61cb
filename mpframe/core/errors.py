"""Errors that a user can fix, in one line: the option, its value, what is allowed, the way out.

Whose code failed: an error in a user's model, loss, metric or optimizer becomes one line.
"""

import difflib
import functools
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor

_NEAR = 0.5  # The least likeness of a name that is offered.
_AS_NEAR = 0.85  # The least likeness beside the nearest name, as a share of that one's.
_LONGEST = 1000  # characters; comparing takes their number squared
_PART = 0.75  # The likeness of a name that contains the word, about that of a typing error.


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
    """The first line of an error's text, and the second if the first ends in a colon.

    An error without text gives the name of its class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


class UserCode:
    """Context manager in which a user's code runs: its errors become `UserCodeError`s.

    Args:
        option: that chose it, e.g. `model` or `dataset: the loss`.
        code: the object or function that is called.
        given: its arguments, for the message.
    """

    def __init__(self, option: str, code: Any, **given: Any) -> None:
        self._option, self._code, self._given = option, code, given

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            blame(self._option, self._code, **self._given)


def blame(option: str, code: Any, **given: Any) -> NoReturn:
    """Raise the present error again, in an `except` clause; a user's becomes a `UserCodeError`.

    The step calls users' code like this, because it costs nothing unless something fails. The
    arguments are those of `UserCode`.
    """
    error = sys.exception()
    if not isinstance(error, Exception | SystemExit) or isinstance(error, MpframeError):
        raise
    raise _errors().explain(error, option, code, given) from error


class InBatch:
    """Context manager in which an error in a user's code names the batch.

    Args:
        split: `training` or `validation`.
        epoch: its number.
        number: the batch's number in it.
        count: how many batches a step has.
        loader: its `batch_ids`, if it has any, are the samples' indices.
    """

    def __init__(
        self, split: str, epoch: int, number: int, count: int = 1, loader: Any = None
    ) -> None:
        self._place, self._loader = (split, epoch, number, count), loader

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserCodeError):
            split, epoch, number, count = self._place
            last = f" to {number + count - 1}" if count > 1 else ""
            if error.row is not None and count == 1 and hasattr(self._loader, "batch_ids"):
                (row, rows), ids = error.row, self._loader.batch_ids(epoch, number)
                last = f", sample {ids[row]}" if len(ids) == rows else ""
            error.args = (f"{error} ({split}, epoch {epoch}, batch {number}{last})",)


def name_of(code: Any) -> str:
    """The name of a function or class, or of an object's class."""
    if isinstance(code, functools.partial):
        return name_of(code.func)
    code = getattr(code, "_orig_mod", code)  # what was compiled
    return str(getattr(code, "__name__", None) or type(code).__name__)


def raised(error: BaseException) -> str:
    """An error as a clause: its class, the first line of its text, and the file and line."""
    return str(_errors().raised(error))


def described(value: Any) -> str:
    """A value in a few words: a tensor's format, shape and, for whole numbers, its range."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" + _range_of(value)
    if value is None:
        return "None"
    kind = _with_article(type(value).__name__)
    if isinstance(value, dict):
        return f"{kind} of {', '.join(map(str, list(value)[:3])) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"{kind} of {', '.join(map(described, value[:3])) or 'nothing'}"
    return kind


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def _range_of(value: Tensor) -> str:
    if value.is_floating_point() or value.is_complex() or not value.numel():
        return ""
    with suppress(RuntimeError):  # After a failure an accelerator may not answer.
        return f" of {int(value.min())} to {int(value.max())}"
    return ""


def _errors() -> Any:
    return import_module("mpframe.core.user_errors")  # The engine does not need it unless it fails.
