"""A pinned module computes in its format with everything inside it, and only it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from vocabulary import HALVES, Kernels, formats

from mpframe import OpLists, Precision

FP32, HALF = torch.float32, torch.float16
X = torch.rand(2, 4)


def pinned(model: nn.Module, pins: dict[str, str], *mode: str, **options: Any) -> Precision:
    """The precision that a model is prepared for."""
    ops = replace(OpLists.named(), modules=pins)
    precision = Precision(*(mode or ("amp",)), ops=ops, **options)
    precision.prepare(model, SGD(model.parameters()))
    return precision


def small() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("modules", "in_fp32", "mode", "half"),
    [
        ({}, set(), "mixed", "float16"),
        ({"1": "fp32"}, {"1.0", "1.2"}, "amp", "float16"),
        ({"1.*": "fp32"}, {"1.0", "1.2"}, "mixed", "bfloat16"),
        ({"1": "fp32", "1.0": "half"}, {"1.2"}, "amp", "bfloat16"),
        ({"1.0": "half", "1": "fp32"}, {"1.0", "1.2"}, "mixed", "float16"),
        ({"1": "half"}, set(), "mixed", "float16"),
        ({"*": "fp32", "2": "half"}, {"0", "1.0", "1.2"}, "amp", "bfloat16"),
    ],
)
def test_what_computes_where(modules: Any, in_fp32: set[str], mode: str, half: str) -> None:
    model = small()
    precision = pinned(model, modules, mode, half, compute="native")
    norms: list[torch.dtype] = []
    model[1][1].register_forward_hook(lambda _, __, result: norms.append(result.dtype))
    with Kernels() as kernels, precision.cast():
        model(X)
    products = [k.given for k in kernels.ran if k.name in ("addmm", "mm")]
    names = ("0", "1.0", "1.2", "2")
    assert products == [{FP32 if name in in_fp32 else HALVES[half]} for name in names]
    assert norms == [HALVES[half] if modules.get("1") == "half" else FP32]


def fail(*_: Any) -> None:
    raise ValueError("here")


@pytest.mark.parametrize("before", [False, True])
def test_an_exception_inside_or_before_leaves_the_pin(before: bool) -> None:
    model = small()
    precision = pinned(model, {"1": "fp32"})
    failing = model[1] if before else model[1][2]
    failing.register_forward_pre_hook(fail, prepend=before)
    with precision.cast():
        with pytest.raises(ValueError, match="here"):
            model(X)
        assert model[2](X).dtype == HALF
    with precision.cast():
        assert model[2](X).dtype == HALF


def test_outside_a_cast_a_pin_does_nothing_and_hooks_once() -> None:
    model = small()
    pinned(model, {"1": "half"}).prepare(model, SGD(model.parameters()))
    assert model(X).dtype == FP32
    assert len(model[1]._forward_pre_hooks) == 1


def test_keyword_and_nested_inputs_are_cast_and_others_are_not() -> None:
    class Takes(nn.Module):
        def forward(self, pair: Any, *, options: Any) -> Any:
            return [pair[0].dtype, pair[1].dtype, options["x"].dtype, options["n"]]

    model = nn.ModuleDict({"takes": Takes(), "weight": nn.Linear(1, 1)})
    with pinned(model, {"takes": "half"}).cast():
        found = model["takes"]((X, X.double()), options={"x": X, "n": 3})
    assert found == [HALF, torch.float64, HALF, 3]


def test_attached_to_be_evaluated_in_another_mode() -> None:
    """Pins of both count, each in its own blocks; a recurrent layer takes half between them."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "rnn": nn.LSTM(4, 3), "last": nn.Linear(3, 2)})
    training = pinned(model, {"last": "fp32"})
    evaluating = Precision(
        "amp", "bfloat16", ops=replace(OpLists.named(), modules={"first": "fp32"})
    )
    evaluating.attach(model)

    def run(precision: Precision) -> list[torch.dtype]:
        with precision.cast():
            first: Tensor = model["first"](X)
            hidden, _ = model["rnn"](first)
            return [first.dtype, hidden.dtype, model["last"](hidden).dtype]

    assert run(training) == [HALF, HALF, FP32]
    assert run(evaluating) == [FP32, torch.bfloat16, torch.bfloat16]
    assert formats(list(model.parameters())) == {FP32}
