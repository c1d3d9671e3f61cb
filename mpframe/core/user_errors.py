"""Explains an error in a user's code: where it was raised, what it was given, and what to do.

`user_code.py` imports this when an error is raised, and not before.
"""

import importlib
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.core.errors import UserCodeError, first_line
from mpframe.core.user_code import described, name_of

_OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")
_LONGEST = 200
"""How many characters of a user's error are repeated."""


def explain(error: BaseException, option: str, code: Any, given: dict[str, Any]) -> UserCodeError:
    """The error in one line: option, code, error, arguments, and the way out."""
    arguments = " and ".join(f"{name} {described(value)}" for name, value in given.items())
    explained = UserCodeError(
        f"{option} {name_of(code)} raised {raised(error)}"
        + (f", given {arguments}" if given else "")
        + f"; {_advice(error, given)}"
    )
    explained.row = _row_of_label(error, given.get("targets"))
    return explained


def raised(error: BaseException) -> str:
    """An error as a clause: its class, the first line of its text, and the file and line."""
    text = first_line(error).rstrip(".") if str(error).strip() else ""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_not_theirs())][:1]
    where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in theirs)
    return f"{type(error).__name__}" + (f" ({text})" if text else "") + where


def _not_theirs() -> tuple[str, ...]:
    packages = (torch, sys.modules.get("hydra"), importlib, sys.modules["mpframe"])
    files = [package.__file__ for package in packages if package is not None]
    return ("<frozen importlib", *(str(Path(file).parent) for file in files if file))


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
