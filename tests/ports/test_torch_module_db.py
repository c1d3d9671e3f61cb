"""torch's module database `module_db`: a module that trains in fp32 trains in `amp` and `mixed`.

On fp32 and on half inputs, as after an fp32 and after a half layer. No example is given: the
classes decide which weights are half.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map
from vocabulary import HALVES

from mpframe import Precision

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated and beta modules

FP32 = torch.float32
MODULES = {info.name.removeprefix("nn."): info for info in module_db if FP32 in info.dtypes}
CHUNKED = "an opt-in kernel of one format, given fp32 data and half weights; traced, they are fp32"
# Modules with samples that fail, each with its reason.
EXCEPTIONS = {"LinearCrossEntropyLoss": CHUNKED}
CASES = [
    pytest.param(name, marks=[pytest.mark.differs(EXCEPTIONS[name])] if name in EXCEPTIONS else [])
    for name in MODULES
]


def samples(info: ModuleInfo, training: bool, count: int) -> Iterator[ModuleInput]:
    torch.manual_seed(0)
    how: Any = {"device": "cpu", "dtype": FP32, "requires_grad": True, "training": training}
    return itertools.islice(info.module_inputs_func(info, **how), count)


def converted(node: Any, dtype: torch.dtype) -> Any:
    """`node` with new leaves, its fp32 tensors in `dtype`."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != FP32:
            return leaf
        return leaf.detach().clone().to(dtype).requires_grad_(leaf.requires_grad)

    return tree_map(convert, node)


def train(
    module: nn.Module, sample: ModuleInput, precision: Precision, dtype: Any, traced: bool = False
) -> None:
    """One forward and backward pass; a lazy module learns its shapes from a call before."""
    if any(map(nn.parameter.is_lazy, module.parameters())):
        module(*converted(sample.forward_input.args, FP32))
    args, kwargs = converted((sample.forward_input.args, sample.forward_input.kwargs), dtype)
    if any(True for _ in module.parameters()):
        example = (lambda module: module(*args, **kwargs)) if traced else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module, _ = precision.prepare(module, optimizer, example)
    with precision.cast():
        result = module(*args, **kwargs)
    plain = tuple(result) if isinstance(result, tuple) else result  # no pytree: a named tuple
    results = [t for t in tree_leaves(plain) if isinstance(t, Tensor)]
    totals = [t.float().sum() for t in results if t.requires_grad]
    if totals:
        torch.stack(totals).sum().backward()


def failures(info: ModuleInfo, training: bool, count: int, traced: bool = False) -> set[str]:
    """The errors of modules that train in fp32."""
    found = set()
    for sample in samples(info, training, count):
        arguments = sample.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs).train(training)
        try:
            train(copy.deepcopy(module), sample, Precision("fp32"), FP32)
        except Exception:
            continue
        for mode, name, wide in itertools.product(("amp", "mixed"), HALVES, (True, False)):
            dtype = FP32 if wide else HALVES[name]
            try:
                train(copy.deepcopy(module), sample, Precision(mode, name), dtype, traced)
            except Exception as error:
                found.add(f"{mode} {name} on {dtype}: {error}".splitlines()[0])
    return found


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_what_trains_in_fp32_trains_in_every_mode(name: str, training: bool) -> None:
    assert failures(MODULES[name], training, 2) == set()


@pytest.mark.storm
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_every_sample_that_trains_in_fp32_trains_in_every_mode(name: str, training: bool) -> None:
    assert bool(failures(MODULES[name], training, 1000)) == (name in EXCEPTIONS)


@pytest.mark.storm
@pytest.mark.parametrize("name", EXCEPTIONS.keys() & MODULES.keys())
def test_what_fails_by_its_class_trains_by_its_trace(name: str) -> None:
    assert failures(MODULES[name], True, 1000, traced=True) == set()
