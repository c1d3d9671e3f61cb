"""Loads files without running code, because a checkpoint may come from anybody.

A crafted file may raise almost anything in torch, zipfile, pickle or json, up to MemoryError and
RecursionError. To the user all of it means one thing: the file is damaged.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpframe.core.errors import CheckpointError, MpframeError, first_line

_OBJECT = re.compile(r"GLOBAL ([\w.]+)")  # in torch's message
_PLAIN = "a checkpoint is tensors, numbers, strings, lists and dicts"


def load_untrusted(path: Path, way_out: str = _PLAIN, mapped: bool = False) -> Any:
    """Load what `torch.save` wrote, without running code: on the CPU, or `mapped` from the file.

    CheckpointError: the file holds objects or functions. A damaged file may raise anything else, so
    call this within `raise_as_damaged`.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = _OBJECT.search(str(error))
        if found is None:  # Torch says the same of a web page as of code.
            raise ValueError("not written by torch.save") from None
        said = f"{path}: holds {found[1]}, and loading it would run code; {way_out}"
        raise CheckpointError(said) from None


@contextmanager
def raise_as_damaged(path: Path, what: str, way_out: str = "use an older one") -> Iterator[None]:
    """Turn any exception in the block, except mpframe's, into one about a damaged file."""
    try:
        yield
    except MpframeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: damaged, {what} ({first_line(error):.120}); {way_out}"
        ) from None
