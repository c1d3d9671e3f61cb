"""Readers of CIFAR-10's two published formats, neither of which runs anything from the file.

Binary: records of 3073 bytes, a label and then 3 x 32 x 32 values, channel by channel.

Python: a pickle of {"labels": [...], "data": uint8 array [N, 3072], ...}. To unpickle is to run
what the file says. A pickle is also a list of opcodes, and that list can be read without running
it: `pickletools.genops` only decodes. The only byte string that is as long as the images are holds
the images, and the small integers after the word "labels" are the labels. The file is still
refused if it names an object, or uses an opcode, that CIFAR-10's own files do not need.
"""

import os
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.errors import DataError
from mpframe.files.plain_file import open_regular

RECORDS = 10_000
"""Images in each of the six published files."""
_PIXELS = 3 * 32 * 32
_LARGEST = 2**26  # bytes; a published file has 31 million
_MOST_OPCODES = 200_000  # a published file has about 60,000

_TEXT = {"SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
_INTEGERS = {"BININT", "BININT1", "BININT2"}
_LISTS = {"EMPTY_LIST", "MARK", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT"}
_FLAGS = {"NEWFALSE", "NEWTRUE"}
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_DICTS = {"EMPTY_DICT", "SETITEM", "SETITEMS"}
_REST = {"PROTO", "STOP", "NONE", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD"}
_OPCODES = _TEXT | _INTEGERS | _LISTS | _FLAGS | _TUPLES | _DICTS | _REST
_GLOBALS = {
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "_codecs encode",
}


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of a file of binary records.

    Returns:
        Images uint8 [10000, 3, 32, 32] and labels uint8 [10000].

    Raises:
        DataError: unreadable or of the wrong length.
    """
    wanted = RECORDS * (1 + _PIXELS)
    try:
        with open_regular(path, "rb", follow=True) as file:
            content = file.read(wanted + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) != wanted:
        raise DataError(
            f"{path}: must be {wanted} bytes, {RECORDS} records of {1 + _PIXELS}, "
            f"but has {path.stat().st_size}; get the file again"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(RECORDS, 1 + _PIXELS)
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), records[:, 0].clone()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of a file of the Python version, read without unpickling.

    Returns:
        Images uint8 [10000, 3, 32, 32] and labels int64 [10000].

    Raises:
        DataError: unreadable, not such a file, or a file that names foreign objects.
    """
    try:
        with open_regular(path, "rb", follow=True) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST:
                raise _refused(path, f"it is larger than {_LARGEST} bytes")
            opcodes = list(_checked_opcodes(path, file))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    pixels, labels = _pixels(path, opcodes), _labels(opcodes)
    if len(labels) != RECORDS:
        raise _refused(path, f"it has {len(labels)} labels, wanted are {RECORDS}")
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return images.view(RECORDS, 3, 32, 32), torch.tensor(labels)


def _checked_opcodes(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """The file's (opcode, argument) pairs; stops at the first one that is not CIFAR-10's."""
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if number >= _MOST_OPCODES:
                raise _refused(path, f"it has more than {_MOST_OPCODES} opcodes")
            if opcode.name not in _OPCODES:
                raise _refused(path, f"opcode {opcode.name} is not used by CIFAR-10's files")
            if opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise _refused(path, f"it names {str(argument)!r}, which was not called")
            yield opcode.name, argument
    except ValueError as error:  # What genops raises for bytes that are no pickle.
        raise _refused(path, str(error).splitlines()[0]) from error


def _pixels(path: Path, opcodes: list[tuple[str, Any]]) -> bytes:
    """The byte string as long as the images."""
    found, by_column = [], False
    for name, argument in opcodes:
        if name in _FLAGS:
            by_column = name == "NEWTRUE"  # The last flag before an array's bytes is its order.
        elif name in _TEXT and len(argument) == RECORDS * _PIXELS:
            found.append((argument, by_column))
    if len(found) != 1 or found[0][1]:
        raise _refused(path, f"it does not hold one row-major array of {RECORDS} x {_PIXELS} bytes")
    pixels = found[0][0]
    if isinstance(pixels, bytes):
        return pixels
    try:
        return str(pixels).encode("latin-1")  # Protocol 2 spells bytes as text.
    except UnicodeEncodeError as error:
        raise _refused(path, "its images are text") from error


def _labels(opcodes: list[tuple[str, Any]]) -> list[int]:
    """The integers of the list that follows the word "labels"."""
    labels: list[int] = []
    inside = False
    for name, argument in opcodes:
        if name in _TEXT and argument != "latin1":  # Written beside a word that was bytes.
            inside = argument in ("labels", b"labels")
        elif inside and name in _INTEGERS:
            labels.append(argument)
        elif labels and name not in _LISTS:
            inside = False
    return labels


def _refused(path: Path, why: str) -> DataError:
    return DataError(
        f"{path}: refused, not a file of CIFAR-10's Python version ({why}); "
        "get cifar-10-python.tar.gz again, or use the binary version"
    )
