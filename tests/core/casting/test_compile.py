"""Model and casts compiled into one graph: the same steps as without."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision, Static


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A convolution with BatchNorm, then products, a norm and a softmax: every list has a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.batch_norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.hidden, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.batch_norm(self.conv(x))), 2).flatten(1)
        x = x + F.gelu(self.norm(self.hidden(x)))
        return self.head(x * x.softmax(-1))


def losses(precision: Precision, compiled: bool, steps: int) -> list[float]:
    model: Any = Net()
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with precision.cast():
            return F.cross_entropy(model(x), y)

    run = torch.compile(forward, fullgraph=True) if compiled else forward
    generator, scaler, found = torch.Generator().manual_seed(1), Static(2.0**8), []
    for _ in range(steps):
        y = torch.randint(0, 4, (8,), generator=generator)
        x = torch.randn(8, 1, 6, 6, generator=generator) + y.view(8, 1, 1, 1)
        loss = run(x, y)
        (loss * scaler.scale).backward()
        optimizer.step(scaler)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("mode", "half"),
    [
        ("mixed", "float16"),
        pytest.param("amp", "bfloat16", marks=pytest.mark.slow),
        pytest.param("fp32", "float16", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_eager(mode: str, half: str) -> None:
    """A compiler may leave out the rounding between two fused element-wise ops, and add in another
    order. Per step that is at most R roundings of relative size u along the way to the loss, each
    of which changes the loss, and by its gradient the next weights, by a share u of themselves:

        |difference after n steps| <= n R u max|loss|

    R = 16 element-wise ops, products and sums between input and loss (of Net); u is half a unit in
    the last place of the run's format.
    """
    precision = Precision(mode, half)
    eager, compiled = losses(precision, False, 20), losses(Precision(mode, half), True, 20)
    u = torch.finfo(torch.float32 if mode == "fp32" else HALVES[half]).eps / 2
    for step, (one, other) in enumerate(zip(eager, compiled, strict=True), 1):
        assert abs(one - other) <= step * 16 * u * max(eager)
    assert eager[-1] < 0.8 * eager[0]  # and it learns


@pytest.mark.parametrize(
    ("mode", "half", "modules"),
    [("mixed", "float16", {"self_attn": "fp32", "norm2": "half"}), ("amp", "bfloat16", {})],
)
def test_one_graph_without_a_first_run(mode: str, half: str, modules: dict[str, str]) -> None:
    """Traced cold, no rule of an op has been found before: also what torch's functions hide."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    precision = Precision(mode, half, ops=replace(OpLists.named(), modules=modules))
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    x = torch.rand(2, 3, 8)

    def forward(x: Tensor) -> Tensor:
        with precision.cast():
            return F.normalize(1 / (model(x) + 9), dim=-1)

    traced = torch.compile(forward, fullgraph=True, backend="eager")(x)
    assert same_bits([traced], [forward(x)])


@pytest.mark.parametrize("inside", [True, False])
def test_steps_share_one_graph(inside: bool) -> None:
    precision, model, graphs = Precision("amp", "bfloat16"), nn.Linear(8, 8), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def in_block(x: Tensor) -> Tensor:
        with precision.cast():
            return model(x)  # type: ignore[no-any-return]

    compiled = torch.compile(in_block if inside else model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with nullcontext() if inside else precision.cast():
            compiled(torch.rand(4, 8)).float().sum().backward()
        optimizer.step()
    assert len(graphs) == 1


def test_blocks_nest_in_a_graph() -> None:
    amp, full = Precision("amp"), Precision("fp32")
    x = torch.rand(4, 4)

    def forward(x: Tensor) -> tuple[torch.dtype, ...]:
        with amp.cast():
            first = x @ x
            with full.cast():
                second = x @ x
            with amp.cast():
                third = x @ x
        return first.dtype, second.dtype, third.dtype, (x @ x).dtype

    expected = (torch.float16, torch.float32, torch.float16, torch.float32)
    assert forward(x) == expected
    assert torch.compile(forward, fullgraph=True, backend="eager")(x) == expected


def test_the_roundings_of_emulation_survive_the_compiler() -> None:
    """Inductor drops a cast to half and back. 1 + 2^-12 must be 1, and 300 * 300 must be inf."""
    precision = Precision("amp", compute="emulated")

    def forward(a: Tensor, b: Tensor) -> Tensor:
        with precision.cast():
            return F.relu(a @ b) @ a

    compiled = torch.compile(forward, fullgraph=True)
    fine, large = torch.full((4, 4), 1 + 2.0**-12), torch.full((4, 4), 300.0)
    assert compiled(fine, large)[0, 0].item() == 4800
    assert compiled(large, large).isinf().all()
    fine.requires_grad_()
    compiled(fine, large).float().sum().backward()
    compiled_gradient, fine.grad = fine.grad, None
    forward(fine, large).float().sum().backward()
    assert same_bits([compiled_gradient], [fine.grad])  # type: ignore[list-item]


@pytest.mark.parametrize("compute", ["native", pytest.param("emulated", marks=pytest.mark.slow)])
def test_kernels_of_a_compiled_model_inside_a_block_are_not_cast_again(compute: str) -> None:
    precision = Precision("amp", "bfloat16", compute=compute)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.rand(4, 8)
    with precision.cast():
        expected = model(x)
        result = torch.compile(model, fullgraph=True)(x)
    # tanh between the products is rounded in eager and need not be when fused: half a unit in
    # the last place of each of 8 terms of size <= 1.
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=9 * 2.0**-9)


Call = Callable[[nn.Module, Tensor], Tensor]


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


def gradients(precision: Precision, call: Call, backend: str | None, at: str = "") -> list[Tensor]:
    """Result and gradients; the block stands in the compiled function, or around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.rand(3, 4).requires_grad_()

    def in_block(x: Tensor) -> Tensor:
        with precision.cast():
            return call(model, x)

    if backend is None:
        result = in_block(x)
    elif at == "inside":
        result = torch.compile(in_block, backend=backend, fullgraph=True)(x)
    else:
        compiled = torch.compile(lambda x: call(model, x), backend=backend, fullgraph=True)
        with precision.cast():
            result = compiled(x)
    result.float().square().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [result.detach(), *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize(
    ("call", "at", "backend", "half", "compute"),
    [
        (by_cond, "", None, "float16", "emulated"),
        (by_cond, "inside", "eager", "float16", "emulated"),
        (by_cond, "around", "aot_eager", "bfloat16", "native"),
        (by_checkpoint, "inside", "aot_eager", "bfloat16", "native"),
        (by_reentrant_checkpoint, "inside", "eager", "float16", "emulated"),
        (by_reentrant_checkpoint, "around", "aot_eager", "bfloat16", "native"),
        (by_region, "inside", "aot_eager", "bfloat16", "native"),
        (by_region, "around", "eager", "float16", "emulated"),
    ],
)
def test_functions_that_an_op_is_given(
    call: Call, at: str, backend: str | None, half: str, compute: str
) -> None:
    precision = Precision("amp", half, compute=compute)
    found = gradients(precision, call, backend, at)
    assert found[0].dtype == HALVES[half]
    assert same_bits(found, gradients(precision, plain, None))


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


@pytest.mark.parametrize(("half", "backend"), [("float16", "eager"), ("bfloat16", "aot_eager")])
def test_the_backward_pass_of_a_custom_function(half: str, backend: str) -> None:
    precision, weight = Precision("amp", half, compute="native"), torch.rand(4, 4)

    def call(x: Tensor, w: Tensor) -> Tensor:
        with precision.cast():
            return Product.apply(x, w)  # type: ignore[no-any-return]

    def found(function: Any) -> list[Any]:
        x, w = torch.ones(3, 4).requires_grad_(), weight.clone().requires_grad_()
        function(x, w).square().sum().backward()
        return [x.grad, w.grad]

    eager = found(call)
    assert same_bits(found(torch.compile(call, backend=backend, fullgraph=True)), eager)
