"""Short names of pytest's fixtures, for the signatures of tests."""

import pytest

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
Shown = pytest.CaptureFixture[str]
