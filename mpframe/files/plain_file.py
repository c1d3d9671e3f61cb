"""Opens files in a folder that may come from anybody: regular files only, never through a link.

Opening a FIFO waits for its other end, a device never ends, and a link can lead to any file of the
user. Only the last part of a path is checked, because the user made the links above it.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither, and no FIFOs as files.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path, mode: str, *, follow: bool = False, **options: Any) -> IO[Any]:
    """Open a regular file as `open` does, and a link only with `follow`.

    OSError: it is a link or not a regular file, or cannot be opened.
    """

    def open_checked(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | _NO_WAIT | (0 if follow else _NO_LINK), 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.strerror = "A link, which is not followed"
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "Not a regular file", name)
        return descriptor

    return open(path, mode, opener=open_checked, **options)


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file; OSError also if it has more than `most` bytes."""
    with open_regular(path, "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"Larger than {most} bytes", str(path))
    return content
