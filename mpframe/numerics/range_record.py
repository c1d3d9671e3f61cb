"""The reports of a run's ranges, in one file of its folder.

    numerics/ranges.bin    { length (8 bytes), zlib of a JSON line and float64 numbers } ...

A report is appended whole. When the file is opened again, a report that a kill cut short is
dropped, and so are the reports of steps that a resumed run repeats.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpframe.errors import DataError
from mpframe.files.durable import AppendLog, write_atomically
from mpframe.numerics.exponents import WIDTH
from mpframe.numerics.ranges import KINDS, Ranges

FOLDER = "numerics"
FILE_NAME = "ranges.bin"
_LENGTH = struct.Struct("<q")


class RangeRecord:
    """Appends to a run's record.

    Args:
        folder: the run's folder.
        kept: steps whose reports stay, for a resumed run.
        on_error: `stop` if the disk is full, or `warn` and write what waits once there is room.
    """

    def __init__(self, folder: Path, kept: int = 0, on_error: str = "stop") -> None:
        path = folder / FOLDER / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = AppendLog(path, on_error)
        content = path.read_bytes() if path.exists() else b""
        whole = [block for block in _blocks(content) if _decoded(block).step <= kept]
        write_atomically(path, b"".join(_LENGTH.pack(len(block)) + block for block in whole))

    def add(self, ranges: Ranges) -> None:
        """Append a report.

        Raises:
            OSError: there is no room, and that stops the run.
        """
        block = _encoded(ranges)
        self._log.append(_LENGTH.pack(len(block)) + block)

    @property
    def pending(self) -> bool:
        """True if the last report waits for room on the disk."""
        return self._log.pending


def read_ranges(folder: Path) -> list[Ranges]:
    """The reports of a run, the oldest first.

    Raises:
        DataError: the run has none, or the file is damaged.
    """
    path = folder / FOLDER / FILE_NAME
    try:
        reports = [_decoded(block) for block in _blocks(path.read_bytes())]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; train the run with numerics=on") from None
    except (ValueError, KeyError, zlib.error) as error:
        raise DataError(f"{path}: damaged ({error}); train the run again") from None
    if not reports:
        raise DataError(f"{path}: holds no report; train for numerics.every steps or more")
    return reports


def _encoded(ranges: Ranges) -> bytes:
    head = {
        "step": ranges.step,
        "scale": ranges.scale,
        "layers": ranges.layers,
        "in_half": ranges.in_half.tolist(),
    }
    numbers = np.concatenate([ranges.rounded_away, ranges.rows.ravel()]).astype("<f8")
    return zlib.compress(json.dumps(head).encode() + b"\n" + numbers.tobytes(), level=1)


def _decoded(block: bytes) -> Ranges:
    head, _, body = zlib.decompress(block).partition(b"\n")
    known = json.loads(head)
    layers, numbers = tuple(known["layers"]), np.frombuffer(body, "<f8")
    rows = numbers[len(layers) :].reshape(len(KINDS), len(layers), WIDTH)
    # An older record does not tell; its pictures showed the limits to every layer.
    in_half = np.array(known.get("in_half", np.ones((len(KINDS), len(layers)))), dtype=bool)
    return Ranges(known["step"], known["scale"], layers, rows, numbers[: len(layers)], in_half)


def _blocks(content: bytes) -> Iterator[bytes]:
    """The whole blocks of a file."""
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + length > len(content):
            return
        yield content[at : at + length]
        at += length
