"""Short names of pytest's fixtures, for the signatures of tests; and a disk that is full."""

import errno
import os
from typing import NoReturn

import pytest

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
Shown = pytest.CaptureFixture[str]


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
