"""Functions that are given to an op, or that are recomputed: cast in a graph as in eager mode."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vocabulary import HALVES, same_bits

from mpframe import Precision

BACKENDS = ["eager", "aot_eager"]
RUNS = [("eager", "float16", "emulated"), ("aot_eager", "bfloat16", "native")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Product(torch.autograd.Function):
    """x @ w, with a backward pass that meets the fp32 gradient and half values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        half = F.linear(x, w)
        ctx.save_for_backward(half.relu(), x, w)
        return half.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        positive, x, w = ctx.saved_tensors
        gradient = gradients[0] * (positive > 0)
        return gradient @ w + positive @ w, gradient.t() @ x


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def by_cond(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: -model(x), (x,))


def by_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def by_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


@torch.compiler.nested_compile_region
def by_region(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def gradients(
    precision: Precision, call: Callable[[nn.Module, Tensor], Tensor], backend: str | None, at: str
) -> list[Tensor]:
    """Result and gradients; the block stands in the compiled function, or around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.rand(3, 4).requires_grad_()

    def in_block(x: Tensor) -> Tensor:
        with precision.cast():
            return call(model, x)

    def around(function: Any, x: Tensor) -> Tensor:
        with precision.cast():
            return function(x)  # type: ignore[no-any-return]

    if backend is None:
        result = in_block(x)
    elif at == "inside":
        result = torch.compile(in_block, backend=backend, fullgraph=True)(x)
    else:
        compiled = torch.compile(lambda x: call(model, x), backend=backend, fullgraph=True)
        result = around(compiled, x)
    result.float().square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [result.detach(), *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize("call", [by_cond, by_checkpoint, by_reentrant_checkpoint, by_region])
@pytest.mark.parametrize(("backend", "half", "compute"), RUNS)
@pytest.mark.parametrize("at", ["inside", "around"])
def test_compiled(
    at: str, backend: str, half: str, compute: str, call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    precision = Precision("amp", half, compute=compute)
    found = gradients(precision, call, backend, at)
    assert found[0].dtype == HALVES[half]
    assert same_bits(found, gradients(precision, plain, None, at))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("compute", ["emulated", "native"])
def test_cond_without_a_compiler(compute: str, half: str) -> None:
    precision = Precision("amp", half, compute=compute)
    found = gradients(precision, by_cond, None, "")
    assert found[0].dtype == HALVES[half]
    assert same_bits(found, gradients(precision, plain, None, ""))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", HALVES)
def test_the_backward_pass_of_a_function(half: str, backend: str) -> None:
    """It meets half and fp32, and runs under the casts of its forward pass, compiled or not."""
    precision, weight = Precision("amp", half, compute="native"), torch.rand(4, 4)

    def call(x: Tensor, w: Tensor) -> Tensor:
        with precision.cast():
            return Product.apply(x, w)  # type: ignore[no-any-return]

    def found(function: Any) -> list[Tensor]:
        x, w = torch.ones(3, 4).requires_grad_(), weight.clone().requires_grad_()
        function(x, w).square().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    eager = found(call)
    assert same_bits(found(torch.compile(call, backend=backend, fullgraph=True)), eager)
