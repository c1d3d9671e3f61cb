"""Tests that start data workers by fork: from Python 3.12 on that warns, beside torch's threads."""

import pytest

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
