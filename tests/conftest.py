"""Makes what the tests share importable from every folder of tests."""

import gc
from collections.abc import Generator, Iterator

import pytest
from ranks import Ranks, ranks


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage among the modules and the tests, which stay until the end.

    Looking for it takes a third of the time of collecting.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Lets Python take all down at its end, as it would without pytest."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks, for all tests that leave them alive."""
    with ranks(2) as own:
        yield own


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four of them."""
    with ranks(4) as own:
        yield own
