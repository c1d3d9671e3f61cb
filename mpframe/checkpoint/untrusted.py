"""Loads files without running code, because a checkpoint may come from anybody.

A crafted file may raise almost anything in torch, zipfile, pickle or json, up to MemoryError and
RecursionError. To the user all of it means one thing: the file is damaged.
"""

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpframe.core.errors import CheckpointError, MpframeError, first_line

_OLD_FORMAT = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how torch began files before 2020


def load_untrusted(path: Path, refusal: str, mapped: bool = False) -> Any:
    """Load what `torch.save` wrote, with its tensors on the CPU, without running code.

    refusal: the message for a file that holds code or objects.
    mapped: leave the tensors in the file, mapped into memory.

    CheckpointError: the file holds code. A damaged file may raise anything else, so call this
    within `raise_as_damaged`.
    """
    _refuse_other_formats(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: {refusal}") from None


def _refuse_other_formats(path: Path) -> None:
    """Refuse what torch did not write, such as a web page, which torch would take for code."""
    with path.open("rb") as file:
        begins_old = file.read(len(_OLD_FORMAT)) == _OLD_FORMAT
    if not begins_old and not zipfile.is_zipfile(path):
        raise ValueError("neither an archive nor torch's older format")


@contextmanager
def raise_as_damaged(path: Path, what: str, way_out: str = "use an older one") -> Iterator[None]:
    """Turn any exception in the block, except mpframe's, into one about a damaged file.

    what: the damage, e.g. `not a manifest`. way_out: what to do then.
    """
    try:
        yield
    except MpframeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: damaged, {what} ({first_line(error):.120}); {way_out}"
        ) from None
