"""The ways in which a step can be computed: `pytest --path=NAME` takes one for all tests."""

import pytest

from mpframe.core.optim import gradients


def _buckets(patch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated by itself, and no half gradient becomes fp32 before that."""
    patch.setattr(gradients, "_SIZE_ON_CPU", 1)
    patch.setattr(gradients, "_FEW", -1)


PATHS = {"plain": lambda patch: None, "buckets": _buckets}
