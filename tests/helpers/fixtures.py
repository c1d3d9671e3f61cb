"""Short names of pytest's fixtures, marks, a refusal's words, a limit of time, and a full disk."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

import pytest
from packaging.version import Version

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
Shown = pytest.CaptureFixture[str]
# Tests that start data workers by fork: from Python 3.12 on that warns, beside torch's threads.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def has_torch(oldest: str) -> bool:
    return Version(version("torch")) >= Version(oldest)


def needs_torch(oldest: str, why: str) -> pytest.MarkDecorator:
    """Skips with an older torch, which lacks what the test is about."""
    return pytest.mark.skipif(not has_torch(oldest), reason=f"needs torch {oldest}, which {why}")


def refused(error: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """The message of the `error` that the call raises, which is one line."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TooLong(BaseException):
    """No `except Exception` on the way swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """What hangs fails, and says so: also where it waits in a system call."""

    def late(*_: Any) -> None:
        raise TooLong(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
