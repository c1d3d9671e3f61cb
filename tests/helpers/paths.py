"""The ways in which a step can be computed: `pytest --path=NAME` takes one for all tests."""

from functools import partial, partialmethod

import pytest
import torch

from mpframe.core import precision
from mpframe.core.optim import gradients, master_weights, masters
from mpframe.core.optim.masters import Master
from mpframe.training.optimizers.split_master import SplitMaster
from mpframe.training.plan import Plan


def _buckets(patch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated by itself, and no half gradient becomes fp32 before that."""
    patch.setattr(gradients, "_SIZE_ON_CPU", 1)
    patch.setattr(gradients, "_FEW", -1)


def _split(patch: pytest.MonkeyPatch) -> None:
    """bfloat16 weights keep of their masters only the bits that they lack."""

    def master(weight: torch.Tensor, start: torch.Tensor) -> Master:
        return (SplitMaster if weight.dtype == torch.bfloat16 else Master)(weight, start)

    plain = masters.master_class
    for module in (master_weights, precision):
        patch.setattr(module, "master_class", lambda kind: master if kind is True else plain(kind))


def _compiled(patch: pytest.MonkeyPatch) -> None:
    """Each trainer compiles its model, by a compiler that leaves the ops as they are."""
    patch.setattr(Plan, "__init__", partialmethod(Plan.__init__, compile=True))
    patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


PATHS = {"plain": lambda patch: None, "buckets": _buckets, "split": _split, "compiled": _compiled}
