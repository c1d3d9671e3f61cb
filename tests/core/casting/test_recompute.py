"""A forward pass that is run again in the backward pass runs under the casts of its first run."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
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

RUNS = [
    (mode, half, compute)
    for mode in ("amp", "mixed")
    for half, compute in (
        ("float16", "emulated"),
        ("bfloat16", "emulated"),
        ("bfloat16", "native"),
    )
]


def own_context() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


KINDS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "own context": partial(checkpoint, use_reentrant=False, context_fn=own_context),
}


def backward_here(loss: Tensor) -> None:
    loss.backward()


def backward_in_another_thread(loss: Tensor) -> None:
    """As CUDA's autograd engine does, whose threads have no casts of their own."""
    in_another_thread(loss.backward)


BACKWARDS = [backward_here, backward_in_another_thread]


class Net(nn.Module):
    """Three blocks: a product before a norm, a recurrent layer, and one that may be pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.cell, self.head = nn.GRU(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

    def first(self, x: Tensor) -> Tensor:
        return self.cell(self.body(x))[0]

    def forward(self, x: Tensor, run: Callable[..., Any] | None = None) -> Tensor:
        run = run or (lambda block, x: block(x))
        return run(self.head, run(self.first, x))


def gradients(
    precision: Precision,
    model: nn.Module,
    x: Tensor,
    run: Callable[..., Any] | None,
    backward: Callable[[Tensor], None] = backward_here,
    inside: bool = False,
) -> list[Tensor]:
    model = copy.deepcopy(model)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x = x.clone().requires_grad_()
    with precision.cast():
        loss = model(x, run).float().square().sum()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
@pytest.mark.parametrize("modules", [{}, {"head": "fp32", "body": "half"}])
def test_checkpoint(
    mode: str,
    half: str,
    compute: str,
    kind: str,
    backward: Callable[[Tensor], None],
    inside: bool,
    modules: dict[str, str],
) -> None:
    lists, x = OpLists.named(), torch.rand(2, 3, 8)
    ops = OpLists(lists.allow, lists.deny, lists.infer, modules)
    precision = Precision(mode, half, ops=ops, compute=compute)
    plain = gradients(precision, Net(), x, None)
    assert same_bits(gradients(precision, Net(), x, KINDS[kind], backward, inside), plain)


class InPinned(nn.Module):
    """Its parts are checkpointed functions of a module that is pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, run: Callable[..., Any] | None) -> Tensor:
        def function(x: Tensor) -> Tensor:
            return F.linear(x, self.head.weight)

        return run(function, x) if run else function(x)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_pinned_module(
    kind: str, backward: Callable[[Tensor], None], inside: bool
) -> None:
    lists, x = OpLists.named(), torch.rand(3, 8)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = InPinned()

        def forward(self, x: Tensor, run: Any) -> Tensor:
            return self.inner(x, run)

    ops = OpLists(lists.allow, lists.deny, lists.infer, {"inner": "fp32"})
    precision = Precision("amp", ops=ops)
    plain = gradients(precision, Outer(), x, None)
    assert same_bits(gradients(precision, Outer(), x, KINDS[kind], backward, inside), plain)
    without = gradients(Precision("amp"), Outer(), x, None)
    assert not same_bits(without, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_a_function_without_modules(mode: str, half: str, compute: str, kind: str) -> None:
    precision, weight = Precision(mode, half, compute=compute), torch.rand(8, 8) / 8

    def gradient(run: Callable[..., Any]) -> Tensor:
        x, w = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)), weight.clone()
        x.requires_grad_()
        w.requires_grad_()
        with precision.cast():
            loss = run(lambda x: F.linear(F.linear(x, w).exp(), w), x).sum()
        loss.backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(gradient(KINDS[kind]), gradient(lambda function, x: function(x)))


@pytest.mark.parametrize(("mode", "half", "compute"), RUNS)
def test_a_weight_that_is_used_on_both_sides(mode: str, half: str, compute: str) -> None:
    """Its cast is made once in the forward pass, and once more where it is run again."""
    precision, x = Precision(mode, half, compute=compute), torch.rand(3, 8)
    weight = torch.rand(8, 8) / 8

    def gradient(run: Callable[..., Any]) -> Tensor:
        w = weight.clone().requires_grad_()
        with precision.cast():
            product = F.linear(x, w)
            loss = F.linear(run(lambda x: F.linear(x, w).exp(), product), w).sum()
        loss.backward()
        assert w.grad is not None
        return w.grad

    found = gradient(KINDS["not reentrant"])
    assert torch.equal(found, gradient(lambda function, x: function(x)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential(use_reentrant: bool) -> None:
    class Deep(nn.Sequential):
        def forward(self, x: Tensor, run: Any = None) -> Tensor:
            if run is None:
                return super().forward(x)
            return checkpoint_sequential(list(self), 2, x, use_reentrant=use_reentrant)

    torch.manual_seed(0)
    model = Deep(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))))
    for mode, half, compute in RUNS:
        precision, x = Precision(mode, half, compute=compute), torch.rand(4, 8)
        plain = gradients(precision, model, x, None)
        assert same_bits(gradients(precision, model, x, checkpoint), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_within_a_checkpoint(kind: str) -> None:
    run, precision, x = KINDS[kind], Precision("amp", "bfloat16"), torch.rand(2, 3, 8)

    def nested(block: Any, x: Tensor) -> Tensor:
        return run(lambda x: run(block, x), x)

    plain = gradients(precision, Net(), x, None)
    assert same_bits(gradients(precision, Net(), x, nested), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_of_the_forward_pass_decides(kind: str) -> None:
    """Not the one that stands around the backward pass."""
    run, x = KINDS[kind], torch.rand(3, 8)
    weight = torch.rand(8, 8)

    def gradient(
        forward: Precision, backward: Precision | None, run: Callable[..., Any] | None
    ) -> Tensor:
        w = weight.clone().requires_grad_()
        inputs = x.clone().requires_grad_()

        def function(x: Tensor) -> Tensor:
            return F.linear(F.linear(x, w).tanh(), w)

        with forward.cast():
            loss = (run(function, inputs) if run else function(inputs)).float().sum()
        with nullcontext() if backward is None else backward.cast():
            loss.backward()
        assert w.grad is not None
        return w.grad

    blocks = [Precision("fp32"), Precision("amp"), Precision("amp", "bfloat16", compute="native")]
    for forward in blocks:
        plain = gradient(forward, None, None)
        for backward in blocks:
            assert torch.equal(gradient(forward, backward, run), plain)


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
