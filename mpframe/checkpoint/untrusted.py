"""Refuses damaged and crafted files in one line, because a checkpoint may come from anybody.

A state file is an archive, which can expand to far more than its size: torch's reader unpacks
compressed entries, and a tensor may claim any number of values over a few bytes. torch itself
writes uncompressed entries, and no tensor that is larger than the file.

A crafted file may raise almost anything in torch, zipfile, pickle or json, up to MemoryError and
RecursionError. To the user all of it means one thing: the file is damaged.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from mpframe.core.errors import CheckpointError, MpframeError, first_line

_LARGEST_PICKLE = 2**24  # bytes, of which 1000 parameters with their optimizer state take 1 MB
_OLD_FORMAT = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # the first of its pickles
_OLD_PICKLES = 5  # this number, a version, facts of the machine, the state, the order of its bytes
_DEEPEST = 50
_MOST_VALUES = 10**7


def load_untrusted(path: Path, refusal: str, old_format: bool = False, mapped: bool = False) -> Any:
    """Load what `torch.save` wrote, with its tensors on the CPU, without running code.

    refusal: the message for a file that holds code or objects.
    old_format: also read torch's format from before 2020.
    mapped: leave the tensors in the file, mapped into memory.

    CheckpointError: the file holds code, or was made to fill the memory or to take minutes. A
    damaged file may raise anything else, so call this within `raise_as_damaged`.
    """
    if old_format and not zipfile.is_zipfile(path):
        _refuse_long_pickles(path)
    else:
        _refuse_bomb(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: {refusal}") from None
    _refuse_oversized(path, state)
    return state


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


def _refuse_bomb(path: Path) -> None:
    """Refuse an archive that torch did not write, before anything is unpacked."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = sum(entry.file_size for entry in entries)
    if size > path.stat().st_size or any(map(_is_odd, entries)):
        raise CheckpointError(
            f"{path}: refused, its entries are not stored as torch stores them; "
            "use another checkpoint"
        )
    pickled = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if pickled > _LARGEST_PICKLE:
        raise CheckpointError(
            f"{path}: refused, its pickle has {pickled} bytes, and {_LARGEST_PICKLE} is more than "
            "any run's; use another checkpoint"
        )


def _refuse_long_pickles(path: Path) -> None:
    """Refuse torch's older format, five pickles and then bytes, if it would take minutes."""
    with path.open("rb") as file:
        head = io.BytesIO(file.read(_LARGEST_PICKLE))
    if not head.getvalue().startswith(_OLD_FORMAT):
        raise ValueError("neither an archive nor torch's older format")
    try:
        for _ in range(_OLD_PICKLES):
            for _ in pickletools.genops(head):
                pass
    except ValueError:
        if len(head.getvalue()) < _LARGEST_PICKLE:
            raise
        raise CheckpointError(
            f"{path}: refused, its pickles have more than {_LARGEST_PICKLE} bytes; use another file"
        ) from None


def _refuse_oversized(path: Path, state: Any) -> None:
    """Refuse a state that is larger than its file, by a tensor or by repeated lists."""
    tensors: list[Tensor] = []
    if _expand(state, {}, tensors) > _MOST_VALUES:
        raise CheckpointError(f"{path}: refused, nested so that it expands to millions of values")
    size = path.stat().st_size
    for tensor in tensors:
        count = tensor.numel() if tensor.layout is torch.strided else tensor._nnz()
        if count * tensor.element_size() > size:
            raise CheckpointError(
                f"{path}: refused, a tensor of {count} values in a file of {size} bytes; "
                "use another checkpoint"
            )


def _is_odd(entry: zipfile.ZipInfo) -> bool:
    name = PurePosixPath(entry.filename.replace("\\", "/"))
    leaves = name.is_absolute() or ".." in name.parts
    return entry.compress_type != zipfile.ZIP_STORED or leaves


def _expand(value: Any, known: dict[int, int], tensors: list[Tensor], depth: int = 0) -> int:
    """Collect the tensors, and count the values, repeated ones as often as they occur."""
    if isinstance(value, Tensor):
        tensors.append(value)
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if depth > _DEEPEST:
        return _MOST_VALUES + 1
    if id(value) not in known:
        members = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expand(one, known, tensors, depth + 1) for one in members)
    return known[id(value)]
