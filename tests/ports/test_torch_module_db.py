"""torch's module database `module_db`: a module that trains in fp32 trains in `amp` and `mixed`.

On fp32 and on half inputs, as after an fp32 and after a half layer. No example is given: the
classes decide which weights are half.
"""

import copy
from itertools import islice, product
from typing import Any

import pytest
import torch
from ported import backward_of, cases, converted
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from vocabulary import HALVES

from mpframe import Precision

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated and beta modules

FP32 = torch.float32
MODULES = {info.name.removeprefix("nn."): info for info in module_db if FP32 in info.dtypes}
CHUNKED = "an opt-in kernel of one format, given fp32 data and half weights; traced, they are fp32"
# Modules with samples that fail, each with its reason.
EXCEPTIONS = {"LinearCrossEntropyLoss": CHUNKED}


def train(
    module: nn.Module, sample: ModuleInput, precision: Precision, dtype: Any, traced: bool = False
) -> None:
    """One forward and backward pass; a lazy module learns its shapes from a call before."""
    given = (sample.forward_input.args, sample.forward_input.kwargs)
    if any(map(nn.parameter.is_lazy, module.parameters())):
        module(*converted(given[0], FP32, FP32))
    args, kwargs = converted(given, dtype, dtype)
    if any(True for _ in module.parameters()):
        example = (lambda module: module(*args, **kwargs)) if traced else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module, _ = precision.prepare(module, optimizer, example)
    with precision.cast():
        result = module(*args, **kwargs)
    backward_of(result)


def failures(info: ModuleInfo, training: bool, count: int, traced: bool = False) -> set[str]:
    """The errors of modules that train in fp32."""
    found = set()
    torch.manual_seed(0)
    how: Any = {"device": "cpu", "dtype": FP32, "requires_grad": True, "training": training}
    for sample in islice(info.module_inputs_func(info, **how), count):
        arguments = sample.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs).train(training)
        try:
            train(copy.deepcopy(module), sample, Precision("fp32"), FP32)
        except Exception:
            continue
        for mode, name, wide in product(("amp", "mixed"), HALVES, (True, False)):
            dtype = FP32 if wide else HALVES[name]
            try:
                train(copy.deepcopy(module), sample, Precision(mode, name), dtype, traced)
            except Exception as error:
                found.add(f"{mode} {name} on {dtype}: {error}".splitlines()[0])
    return found


@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.storm)])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", cases(MODULES, EXCEPTIONS))
def test_what_trains_in_fp32_trains_in_every_mode(name: str, training: bool, count: int) -> None:
    found = failures(MODULES[name], training, count)
    assert bool(found) == (name in EXCEPTIONS and count > 2), found


@pytest.mark.storm
@pytest.mark.parametrize("name", EXCEPTIONS.keys() & MODULES.keys())
def test_what_fails_by_its_class_trains_by_its_trace(name: str) -> None:
    assert failures(MODULES[name], True, 1000, traced=True) == set()
