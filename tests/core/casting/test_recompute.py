"""A forward pass that is run again in the backward pass runs under the casts of its first run."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from vocabulary import in_another_thread, same_bits

from mpframe import OpLists, Precision

Run = Callable[..., Any]
RUNS = [
    ("amp", "float16", "emulated"),
    ("mixed", "bfloat16", "emulated"),
    ("amp", "bfloat16", "native"),
]


def own_context() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


def plain(function: Run, *inputs: Any) -> Any:
    return function(*inputs)


KINDS: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "own context": partial(checkpoint, use_reentrant=False, context_fn=own_context),
}


class Net(nn.Module):
    """Three blocks: a product before a norm, a recurrent layer, and one that may be pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.cell, self.head = nn.GRU(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

    def first(self, x: Tensor) -> Tensor:
        return self.cell(self.body(x))[0]

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(self.head, run(self.first, x))


class InPinned(nn.Module):
    """Its parts are functions of a module that may be pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        return run(lambda x: F.linear(x, self.head.weight), x)


def gradients(
    precision: Precision,
    model: nn.Module,
    run: Run,
    *,
    elsewhere: bool = False,
    around: Any = nullcontext,
) -> list[Tensor]:
    """elsewhere: in another thread, as CUDA's autograd engine, which has no casts of its own."""
    model = copy.deepcopy(model)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with precision.cast():
        loss = model(x, run).float().square().sum()
    with around():
        in_another_thread(loss.backward) if elsewhere else loss.backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("mode", "half", "compute", "modules"),
    [
        (*RUNS[0], {"head": "fp32", "body": "half"}),
        (*RUNS[1], {}),
        (*RUNS[2], {"head": "fp32"}),
    ],
)
def test_checkpoint(
    mode: str, half: str, compute: str, modules: Any, inside: bool, elsewhere: bool, kind: str
) -> None:
    ops = replace(OpLists.named(), modules=modules)
    precision = Precision(mode, half, ops=ops, compute=compute)
    around = precision.cast if inside else nullcontext
    found = gradients(precision, Net(), KINDS[kind], elsewhere=elsewhere, around=around)
    assert same_bits(found, gradients(precision, Net(), plain))


@pytest.mark.parametrize(("elsewhere", "inside"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_pinned_module(kind: str, elsewhere: bool, inside: bool) -> None:
    class Outer(InPinned):
        def __init__(self) -> None:
            super().__init__()
            self.inner = InPinned()

        def forward(self, x: Tensor, run: Run) -> Tensor:
            return self.inner(x, run)

    precision = Precision("amp", ops=replace(OpLists.named(), modules={"inner": "fp32"}))
    expected, around = (
        gradients(precision, Outer(), plain),
        precision.cast if inside else nullcontext,
    )
    found = gradients(precision, Outer(), KINDS[kind], elsewhere=elsewhere, around=around)
    assert same_bits(found, expected)
    assert not same_bits(gradients(Precision("amp"), Outer(), plain), expected)


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_a_weight_that_is_used_on_both_sides(mode: str, half: str, compute: str) -> None:
    """Its cast is made once in the forward pass, and once more where it is run again."""
    precision, x = Precision(mode, half, compute=compute), torch.rand(3, 8)
    weight = torch.rand(8, 8) / 8

    def gradient(run: Run) -> Tensor:
        w = weight.clone().requires_grad_()
        with precision.cast():
            product = F.linear(x, w)
            loss = F.linear(run(lambda x: F.linear(x, w).exp(), product), w).sum()
        loss.backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(gradient(KINDS["not reentrant"]), gradient(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential(use_reentrant: bool) -> None:
    class Deep(nn.Sequential):
        def forward(self, x: Tensor, run: Run) -> Tensor:
            if run is plain:
                return super().forward(x)
            return checkpoint_sequential(list(self), 2, x, use_reentrant=use_reentrant)

    model = Deep(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))))
    precision = Precision("mixed", "bfloat16", compute="native")
    found = gradients(precision, model, checkpoint)
    assert same_bits(found, gradients(precision, model, plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_within_a_checkpoint(kind: str) -> None:
    run, precision = KINDS[kind], Precision("amp", "bfloat16")
    found = gradients(precision, Net(), lambda block, x: run(lambda x: run(block, x), x))
    assert same_bits(found, gradients(precision, Net(), plain))


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_of_the_forward_pass_decides(kind: str) -> None:
    """Not the one that stands around the backward pass."""
    blocks = [Precision("fp32"), Precision("amp"), Precision("amp", "bfloat16", compute="native")]
    for forward in blocks:
        expected = gradients(forward, Net(), plain)
        for backward in blocks:
            found = gradients(forward, Net(), KINDS[kind], around=backward.cast)
            assert same_bits(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_that_fails_leaves_no_block_open(kind: str) -> None:
    fail, x = False, torch.rand(4, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        if fail:
            raise ArithmeticError
        return x @ x

    with Precision("amp").cast():
        loss = KINDS[kind](function, x).sum()
    fail = True
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert (x @ x).dtype == torch.float32
    with Precision("amp", "bfloat16").cast():
        assert (x @ x).dtype == torch.bfloat16
