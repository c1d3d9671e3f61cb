"""Whose code failed: an error in a user's model, loss, metric or optimizer becomes one line.

    with user_code("model:", model, inputs=inputs):
        outputs = model(inputs)

    model: Net raised RuntimeError (mat1 and mat2 must have the same dtype, but got Byte and Float)
    at net.py:12, given inputs uint8 [64, 8] of 0 to 255

mpframe's errors pass unchanged. A SystemExit in a layer is an error like any other.
"""

import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mpframe.core.errors import MpframeError, UserCodeError, first_line

_INPUT_DTYPE = re.compile(r"(?<!target )dtype|Input type")
_OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")


@contextmanager
def user_code(option: str, code: Any, **given: Any) -> Iterator[None]:
    """Context manager in which a user's code runs: its errors become `UserCodeError`s.

    Args:
        option: the option that chose it, e.g. `model` or `dataset: the loss`.
        code: the object or function that is called, with the arguments `given`.
    """
    try:
        yield
    except BaseException:
        blame(option, code, **given)


def blame(option: str, code: Any, **given: Any) -> NoReturn:
    """Raise the present error again, in an `except` clause, as `user_code` does.

    The step calls it directly, because without an error it costs nothing.
    """
    error = sys.exception()
    if not isinstance(error, Exception | SystemExit) or isinstance(error, MpframeError):
        raise
    label = _OUT_OF_BOUNDS.search(str(error))
    line = f"{option} {name_of(code)} raised {describe_error(error)}" + ", given " * bool(given)
    line += " and ".join(f"{name} {describe(value)}" for name, value in given.items())
    explained = UserCodeError(f"{line}; {_advice(error, label, given)}")
    targets = given.get("targets")
    if label and isinstance(targets, Tensor) and targets.dim():
        rows = (targets == int(label[1])).nonzero()
        explained.row = (int(rows[0, 0]), len(targets)) if len(rows) else None
    raise explained from error


def _advice(error: BaseException, label: re.Match[str] | None, given: dict[str, Any]) -> str:
    """Return a way out that the arguments show, or else how to see the traceback."""
    outputs = given.get("outputs")
    if given.keys() & {"inputs", "batch"} and _INPUT_DTYPE.search(str(error)):
        formats = "float32 (x.float()) for most layers and int64 for an embedding"
        return f"inputs must have the format of the weights, {formats}"
    if "outputs" in given and not isinstance(outputs, Tensor):
        return "let the model return one tensor, or give the dataset a loss for what it returns"
    classes = _range(given.get("targets"))[1] + 1
    if isinstance(outputs, Tensor) and outputs.dim() > 1 and classes > outputs.shape[1]:
        return (
            f"the targets name {classes} classes, the outputs have {outputs.shape[1]}: let the "
            f"model return {classes}, as by model.classes={classes}, or correct the labels"
        )
    if label:
        return f"{label[1]} is no class: correct the label, or use -100, which is left out"
    return "HYDRA_FULL_ERROR=1 shows the traceback"


def name_of(code: Any) -> str:
    """Return the name of a function or class, or of an object's class."""
    if isinstance(code, functools.partial):
        return name_of(code.func)
    code = getattr(code, "_orig_mod", code)  # what was compiled
    return str(getattr(code, "__name__", None) or type(code).__name__)


def describe_error(error: BaseException) -> str:
    """Return an error as a clause: its class, its first line, and where it was raised."""
    text = first_line(error).rstrip(".") if str(error).strip() else ""
    text = text if len(text) <= 200 else f"{text[:200]}..."
    packages = (torch, sys.modules.get("hydra"), importlib, sys.modules["mpframe"])
    files = [package.__file__ for package in packages if package is not None]
    ours = ("<frozen importlib", *(f"{Path(file).parent}{os.sep}" for file in files if file))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    library = f"{Path(os.__file__).parent}{os.sep}", "site-packages"  # The user wrote none of it.
    own = [f for f in theirs if not any(folder in f.filename for folder in library)]
    last = own[-1:] or theirs[:1]  # An objective may call a model that raises.
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in last)
    return f"{type(error).__name__}" + (f" ({text})" if text else "") + where


def describe(value: Any) -> str:
    """Describe a value in words: a tensor by its format, shape and, if of integers, its range."""
    if isinstance(value, Tensor):
        low, high = _range(value)
        ends = f" of {low} to {high}" if low <= high else ""
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{ends}"
    if value is None:
        return "None"
    noun = type(value).__name__
    kind = f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
    if not isinstance(value, dict | list | tuple):
        return kind
    few = map(str, list(value)[:3]) if isinstance(value, dict) else map(describe, value[:3])
    return f"{kind} of {', '.join(few) or 'nothing'}"


def _range(value: Any) -> tuple[int, int]:
    """Return the ends of a tensor of whole numbers, or (0, -1) for any other value."""
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        with suppress(RuntimeError):  # An empty tensor, or an accelerator that has failed.
            return int(value.min()), int(value.max())
    return 0, -1
