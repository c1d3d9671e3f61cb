"""Makes what the tests share importable from every folder of tests."""

from collections.abc import Iterator

import pytest
from ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks, for all tests that leave them alive."""
    with ranks(2) as own:
        yield own
