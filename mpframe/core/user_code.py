"""Whose code failed: an error in a user's model, loss, metric or optimizer becomes one line.

    with UserCode("model", model, inputs=inputs):
        outputs = model(inputs)

    model: Net raised RuntimeError (mat1 and mat2 must have the same dtype, but got Byte and Float)
    at net.py:12, given inputs uint8 [64, 8] of 0 to 255; ...

mpframe's errors pass unchanged. SystemExit is an error like any other: if a layer calls
`sys.exit(0)`, the training has not finished.
"""

import functools
import sys
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor

from mpframe.core.errors import MpframeError, UserCodeError


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
