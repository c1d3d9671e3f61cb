"""A pinned module computes in its format with everything inside it, and only it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from vocabulary import HALVES, Kernels, formats

from mpframe import OpLists, Precision

FP32, HALF = torch.float32, torch.float16


def lists(pins: dict[str, str]) -> OpLists:
    return replace(OpLists.named(), modules=pins)


def ran(model: nn.Module, precision: Precision, x: Tensor) -> dict[str, set[torch.dtype]]:
    """Formats given to the products of each module."""
    found: dict[str, set[torch.dtype]] = {}
    modes: dict[nn.Module, Kernels] = {}

    def enter(module: nn.Module, _: Any) -> None:
        modes[module] = Kernels()
        modes[module].__enter__()

    def leave(name: str, module: nn.Module, *_: Any) -> None:
        modes[module].__exit__(None, None, None)
        products = [k for k in modes[module].ran if k.name in ("addmm", "mm")]
        found[name] = {d for k in products for d in k.given}

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(partial(leave, name))
    with precision.cast():
        model(x)
    return found


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
        ({"*": "fp32"}, {"0", "1.0", "1.2", "2"}, "mixed", "float16"),
        ({"*": "fp32", "2": "half"}, {"0", "1.0", "1.2"}, "amp", "bfloat16"),
    ],
)
def test_what_computes_where(
    modules: dict[str, str], in_fp32: set[str], mode: str, half: str
) -> None:
    model = small()
    precision = Precision(mode, half, ops=lists(modules), compute="native")
    precision.prepare(model, SGD(model.parameters()))
    expected = {n: {FP32 if n in in_fp32 else HALVES[half]} for n in ("0", "1.0", "1.2", "2")}
    norms: list[torch.dtype] = []
    model[1][1].register_forward_hook(lambda _, __, result: norms.append(result.dtype))
    assert ran(model, precision, torch.rand(2, 4)) == expected
    assert norms == [HALVES[half] if modules.get("1") == "half" else FP32]


def test_an_exception_inside_leaves_the_pin() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("inside")

    model = nn.ModuleDict({"bad": nn.Sequential(nn.Linear(4, 4), Fails()), "good": nn.Linear(4, 4)})
    precision = Precision("amp", ops=lists({"bad": "fp32"}))
    precision.prepare(model, SGD(model.parameters()))
    with precision.cast():
        with pytest.raises(ValueError, match="inside"):
            model["bad"](torch.rand(2, 4))
        assert model["good"](torch.rand(2, 4)).dtype == HALF
    with precision.cast():
        assert model["good"](torch.rand(2, 4)).dtype == HALF


def test_a_hook_that_fails_before_the_pin_was_entered() -> None:
    model = small()
    precision = Precision("amp", ops=lists({"1": "fp32"}))
    precision.prepare(model, SGD(model.parameters()))

    def fail(*_: Any) -> None:
        raise ValueError("before")

    handle = model[1].register_forward_pre_hook(fail, prepend=True)
    with precision.cast(), pytest.raises(ValueError, match="before"):
        model(torch.rand(2, 4))
    handle.remove()
    with precision.cast():
        assert model(torch.rand(2, 4)).dtype == HALF


def test_outside_a_cast_a_pin_does_nothing_and_preparing_twice_hooks_once() -> None:
    model = small()
    precision = Precision("amp", ops=lists({"1": "half"}))
    for _ in range(2):
        precision.prepare(model, SGD(model.parameters()))
    assert model(torch.rand(2, 4)).dtype == FP32
    assert len(model[1]._forward_pre_hooks) == 1


def test_keyword_and_nested_inputs_are_cast_and_others_are_not() -> None:
    class Takes(nn.Module):
        def forward(self, pair: Any, *, options: Any) -> Any:
            return [pair[0].dtype, pair[1].dtype, options["x"].dtype, options["n"]]

    model = nn.ModuleDict({"takes": Takes()})
    precision = Precision("amp", ops=OpLists(allow=frozenset({"mm"}), modules={"takes": "half"}))
    precision.prepare(model, SGD([nn.Parameter(torch.ones(1))]))
    x = torch.ones(2)
    with precision.cast():
        found = model["takes"]((x, x.double()), options={"x": x, "n": 3})
    assert found == [HALF, torch.float64, HALF, 3]


def test_attached_to_be_evaluated_in_another_mode() -> None:
    """Pins of both count, each in its own blocks; a recurrent layer takes half between them."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "rnn": nn.LSTM(4, 3), "last": nn.Linear(3, 2)})
    training = Precision("amp", ops=lists({"last": "fp32"}))
    training.prepare(model, SGD(model.parameters()))
    evaluating = Precision("amp", "bfloat16", ops=lists({"first": "fp32"}))
    evaluating.attach(model)

    def run(precision: Precision) -> list[torch.dtype]:
        with precision.cast():
            first = model["first"](torch.rand(2, 4))
            hidden, _ = model["rnn"](first)
            return [first.dtype, hidden.dtype, model["last"](hidden).dtype]

    assert run(training) == [HALF, HALF, FP32]
    assert run(evaluating) == [FP32, torch.bfloat16, torch.bfloat16]
    assert formats(list(model.parameters())) == {FP32}
