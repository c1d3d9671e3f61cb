"""One long row of tokens: from a file that is mapped into memory, or from many files at once.

A token is a byte, or a number below 65,536 in two bytes, least significant first (what numpy's
`array.astype("<u2").tofile(path)` writes).
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpframe.errors import DataError
from mpframe.files import open_regular

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_MOST_BYTES = 2**30  # that a folder may hold; one file may be of any size


def read_tokens(root: str | None, token_bytes: int) -> Tokens:
    """The tokens of a text.

    Args:
        root: a file, which is mapped and not read; a folder, whose *.txt files (but no links) are
            joined in the order of their paths; None: the source of Python's own library.
        token_bytes: 1 or 2.

    Returns:
        [T] uint8 or uint16, read-only.

    Raises:
        DataError: there is nothing to read, or it cannot be read.
    """
    path = Path(sysconfig.get_path("stdlib") if root is None else root)
    try:
        if path.is_dir():
            return _joined(
                path, _library(path) if root is None else path.rglob("*.txt"), token_bytes
            )
        return _mapped(path, DTYPES[token_bytes])
    except OSError as error:
        raise DataError(
            f"dataset.root={root}: {error.filename or path} cannot be read ({error.strerror}); "
            "give a text file, a folder of *.txt files, or null for the source of Python's library"
        ) from None


def _mapped(path: Path, dtype: np.dtype[Any]) -> Tokens:
    with open_regular(path, "rb", follow=True) as file:
        size = os.fstat(file.fileno()).st_size
        if not size or size % dtype.itemsize:
            raise DataError(
                f"{path}: {size} bytes are no row of tokens of {dtype.itemsize} each; set "
                "dataset.token_bytes to what the file was written with"
            )
        return np.memmap(file, dtype, mode="r")


def _joined(folder: Path, files: Iterable[Path], token_bytes: int) -> Tokens:
    chosen = sorted(path for path in files if path.is_file() and not path.is_symlink())
    size = sum(path.stat().st_size for path in chosen)
    if not size or size > _MOST_BYTES or token_bytes != 1:
        raise DataError(
            f"{folder}: a folder needs *.txt files of at most {_MOST_BYTES} bytes in all and "
            f"dataset.token_bytes=1, and it has {len(chosen)} of {size} bytes; join them into one "
            "file, which is not read into memory"
        )
    pieces = []
    for path in chosen:
        with open_regular(path, "rb") as file:
            pieces.append(file.read())
    return np.frombuffer(b"\n".join(pieces), np.uint8)


def _library(folder: Path) -> Iterable[Path]:
    """The modules of Python's library, without its tests and what was installed beside it."""
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        if name in sys.stdlib_module_names:
            yield path
