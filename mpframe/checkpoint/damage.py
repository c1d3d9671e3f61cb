"""Whatever goes wrong in reading a checkpoint means one thing: it is damaged.

What a crafted or torn file may raise in torch, zipfile, pickle or json has no end: from IndexError
and AssertionError to MemoryError and RecursionError. None of it is the user's concern.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpframe.errors import CheckpointError, MpframeError


@contextmanager
def damaged_if_raising(path: Path, what: str) -> Iterator[None]:
    """Within the block any exception but mpframe's own says that a file is damaged.

    Args:
        path: the file that the block reads.
        what: that it is then, e.g. `not a manifest`.

    Raises:
        CheckpointError: the block raised.
    """
    try:
        yield
    except MpframeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: damaged, {what} ({first_line(error)}); use an older one"
        ) from None


def first_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 120 letters, or else its name."""
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
