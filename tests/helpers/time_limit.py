"""A time limit around one case: what hangs fails, and says so."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLong(BaseException):
    """No `except Exception` on the way swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail where the block takes longer, also where it waits in a system call."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
