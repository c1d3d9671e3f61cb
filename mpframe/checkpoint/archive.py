"""A state file is an archive, and an archive can hold far more than its size.

torch's reader unpacks what is compressed, a thousandfold if need be, and a tensor may claim any
number of values over a few bytes. What torch writes does neither: its entries are stored as they
are, and no tensor is larger than the file.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from mpframe.errors import CheckpointError


def refuse_bomb(path: Path) -> None:
    """Refuse a state file that is not as torch writes it, before anything of it is unpacked.

    Raises:
        CheckpointError: not an archive, or one with entries that are compressed, overlap, or are
            named as if to leave their folder.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a saved state ({str(error).splitlines()[0]}); use another checkpoint"
        ) from None
    size = sum(entry.file_size for entry in entries)
    if size > path.stat().st_size or any(map(_is_odd, entries)):
        raise CheckpointError(
            f"{path}: refused, its entries are not stored as torch stores them; "
            "use another checkpoint"
        )


def refuse_hollow(path: Path, state: Any) -> None:
    """Refuse a state with a tensor that claims more bytes than its whole file has.

    Raises:
        CheckpointError: there is one.
    """
    size = path.stat().st_size
    for tensor in _tensors(state):
        if tensor.numel() * tensor.element_size() > size:
            raise CheckpointError(
                f"{path}: refused, a tensor of {tensor.numel()} values in a file of {size} bytes; "
                "use another checkpoint"
            )


def _is_odd(entry: zipfile.ZipInfo) -> bool:
    name = PurePosixPath(entry.filename.replace("\\", "/"))
    leaves = name.is_absolute() or ".." in name.parts
    return entry.compress_type != zipfile.ZIP_STORED or leaves


def _tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in a state, however deep it is nested and whether or not it holds itself."""
    waiting, seen = [state], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
