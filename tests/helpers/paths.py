"""The ways in which a step can be computed: `pytest --path=NAME` takes one for all tests."""

from functools import partial, partialmethod

import pytest
import torch

from mpframe.core.optim import gradients
from mpframe.training.plan import Plan


def _buckets(patch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated by itself, and no half gradient becomes fp32 before that."""
    patch.setattr(gradients, "_SIZE_ON_CPU", 1)
    patch.setattr(gradients, "_FEW", -1)


def _compiled(patch: pytest.MonkeyPatch) -> None:
    """Each trainer compiles its model, by a compiler that leaves the ops as they are."""
    patch.setattr(Plan, "__init__", partialmethod(Plan.__init__, compile=True))
    patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


PATHS = {"plain": lambda patch: None, "buckets": _buckets, "compiled": _compiled}
