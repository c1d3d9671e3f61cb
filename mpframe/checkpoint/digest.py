"""SHA-256 of files, computed while they are written and verified piece by piece.

Neither keeps a whole file in memory: a checkpoint may be larger than the free memory.
"""

import hashlib
from pathlib import Path
from typing import IO

from mpframe.files.plain_file import open_regular

PIECE = 2**20  # bytes read at once


class HashingFile:
    """Writes to a file, and computes the digest of what is written.

    After a failed write nothing more is written, and `raise_if_failed` raises the error. It is not
    raised at once: torch's writer would continue at a wrong position and report that instead.

    Args:
        file: open for binary writing.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        """Write all of `content`, unless writing has failed."""
        try:
            if self._error is None:
                self._file.write(content)
                self._digest.update(content)
        except OSError as error:
            self._error = error
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def raise_if_failed(self) -> None:
        """Raise the OSError of the write that failed, if one did."""
        if self._error is not None:
            raise self._error

    def sha256(self) -> str:
        """The digest of all that was written, in hexadecimal."""
        return self._digest.hexdigest()


def sha256_of(path: Path) -> str:
    """The digest of a regular file, in hexadecimal.

    Raises:
        OSError: it cannot be read, or is a link or not a regular file.
    """
    digest = hashlib.sha256()
    with open_regular(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
