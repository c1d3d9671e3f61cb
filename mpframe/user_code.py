"""Whose code failed: an error in a user's model, loss, metric or optimizer becomes one line.

    with UserCode("model", model, inputs=inputs):
        outputs = model(inputs)

    model: Net raised RuntimeError (mat1 and mat2 must have the same dtype, but got Byte and Float)
    at own.py:12, given inputs uint8 [64, 8] of 0 to 255; ...

mpframe's own errors pass unchanged. SystemExit is an error like any other: if a layer calls
`sys.exit(0)`, the training has not finished.
"""

import functools
import importlib
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import hydra
import torch
from torch import Tensor

from mpframe.errors import MpframeError, UserCodeError, first_line

_PACKAGES = (torch.__file__, hydra.__file__, importlib.__file__, __file__)
_NOT_THEIRS = ("<frozen importlib", *(str(Path(file).parent) for file in _PACKAGES))
_OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")
_LONGEST = 200
"""How many characters of a user's error are repeated."""


class UserCode:
    """Within the block a user's code runs. An error that it raises becomes a `UserCodeError`.

    Args:
        option: that chose it, e.g. `model` or `dataset: the loss`.
        code: the object or function that is called.
        given: its arguments, for the message.
    """

    def __init__(self, option: str, code: Any, **given: Any) -> None:
        self._option = option
        self._code = code
        self._given = given

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            blame(self._option, self._code, **self._given)


def blame(option: str, code: Any, **given: Any) -> NoReturn:
    """Raise the present error again; if it is a user's, as a `UserCodeError`.

    It is for an `except` clause. The step runs users' code in this way: it costs nothing as long as
    nothing fails.

    Args:
        option, code, given: as for `UserCode`.
    """
    error = sys.exception()
    if not isinstance(error, Exception | SystemExit) or isinstance(error, MpframeError):
        raise
    described_ones = " and ".join(f"{name} {described(own)}" for name, own in given.items())
    blamed = UserCodeError(
        f"{option} {name_of(code)} raised {raised(error)}"
        + (f", given {described_ones}" if given else "")
        + f"; {_advice(error, given)}"
    )
    blamed.row = _row_of_label(error, given.get("targets"))
    raise blamed from error


class InBatch:
    """Within the block an error in users' code names the batch.

    Args:
        split: `training` or `validation`.
        epoch: its number.
        number: the batch's number in it.
        count: how many batches a step has.
        loader: whose `batch_ids`, if it has any, are the samples' indices.
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
    text = first_line(error).rstrip(".") if str(error).strip() else ""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)][:1]
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in theirs)
    return f"{type(error).__name__}" + (f" ({text})" if text else "") + where


def described(value: Any) -> str:
    """What a value is, in a few words: a tensor's format, shape and (of whole numbers) range."""
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


def _advice(error: BaseException, given: dict[str, Any]) -> str:
    """What the user can do, if the arguments show it."""
    outputs, targets = given.get("outputs"), given.get("targets")
    if "inputs" in given and "dtype" in str(error):
        return (
            "inputs must have the format of the weights, float32 for most layers and int64 for an "
            "embedding"
        )
    if "outputs" in given and not isinstance(outputs, Tensor):
        return "let the model return one tensor, or give the dataset a loss for what it returns"
    classes = _classes_wanted(outputs, targets)
    if classes is not None and isinstance(outputs, Tensor):
        return (
            f"the targets name {classes} classes, the outputs have {outputs.shape[1]}: set "
            f"model.classes={classes}, or correct the labels"
        )
    label = _OUT_OF_BOUNDS.search(str(error))
    if label:
        return f"{label[1]} is no class: correct the label, or use -100, which is left out"
    return "HYDRA_FULL_ERROR=1 shows the traceback"


def _row_of_label(error: BaseException, targets: Any) -> tuple[int, int] | None:
    """The first row that holds the label which torch says is out of bounds, of how many rows."""
    label = _OUT_OF_BOUNDS.search(str(error))
    if label is None or not isinstance(targets, Tensor) or not targets.dim():
        return None
    rows = (targets == int(label[1])).nonzero()
    return (int(rows[0, 0]), len(targets)) if len(rows) else None


def _classes_wanted(outputs: Any, targets: Any) -> int | None:
    """How many classes the labels name, if that is more than the outputs have."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
        return None
    if targets.is_floating_point() or targets.is_complex() or not targets.numel():
        return None
    with suppress(RuntimeError):
        classes = int(targets.max()) + 1
        return classes if classes > outputs.shape[1] else None
    return None
