"""Reader of the idx format, in which MNIST and its successors are published.

    0 0 type rank            four bytes; type 8 is unsigned byte
    size_1 ... size_rank     big-endian 32-bit
    values                   row-major, exactly size_1 · ... · size_rank bytes

The file is untrusted: the sizes are checked before a value is read, and no more is
unpacked than they promise, so a small gz file cannot fill the memory.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from mpframe.errors import DataError

_UNSIGNED_BYTE = 8
_MOST_ITEMS = 2**20


def read_idx(path: Path, item: tuple[int, ...]) -> Tensor:
    """Read a file of unsigned bytes.

    Args:
        path: the file, plain or `.gz`.
        item: the shape of one item: (28, 28) for images, () for labels.

    Returns:
        uint8 [N, *item], N at most 2^20.

    Raises:
        DataError: unreadable, damaged, or not a file of such items.
    """
    try:
        with _opened(path) as file:
            shape = _read_shape(path, file, item)
            size = math.prod(shape)
            values = file.read(size + 1)  # One more, to see a file that holds more than it says.
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from error
    if len(values) != size:
        found = "more" if len(values) > size else f"only {len(values)}"
        raise _damaged(path, f"its header promises {size} bytes of values and it holds {found}")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(shape)


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_shape(path: Path, file: IO[bytes], item: tuple[int, ...]) -> tuple[int, ...]:
    rank = 1 + len(item)
    magic = bytes([0, 0, _UNSIGNED_BYTE, rank])
    header = file.read(4 + 4 * rank)
    if len(header) != 4 + 4 * rank or header[:4] != magic:
        raise _damaged(path, f"it does not begin with {magic.hex(' ')} and {rank} sizes")
    count, *rest = struct.unpack(f">{rank}I", header[4:])
    if tuple(rest) != item or not 0 < count <= _MOST_ITEMS:
        wanted = " x ".join(["N", *map(str, item)])
        found = " x ".join(map(str, [count, *rest]))
        raise _damaged(path, f"it holds {found} values, wanted is {wanted} with N up to 2^20")
    return (count, *item)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: not a whole idx file: {what}; get the file again")
