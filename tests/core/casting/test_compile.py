"""Model and casts compiled into one graph: the same steps as without."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_regions import gradients
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch.utils.checkpoint import checkpoint
from vocabulary import HALVES, inside, same_bits

from mpframe import OpLists, Precision, Static

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "half"), [("mixed", "float16"), ("amp", "bfloat16")])
def test_twenty_steps_are_those_of_eager(mode, half) -> None:
    """A compiler may leave out roundings of fused ops, and add in another order: R = 16 of size
    u, half a unit in the last place, on the way to the loss, so after n steps n R u max|loss|."""
    eager, compiled = losses = [], []
    for found in losses:
        torch.manual_seed(0)  # Each list has a part: products, norms and a softmax.
        convolution = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)
        products = nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)
        net, precision = nn.Sequential(*convolution, nn.Flatten(), *products), Precision(mode, half)
        model, optimizer = precision.prepare(net, sgd(net))

        run = inside(precision, lambda x, y, model=model: F.cross_entropy(model(x), y))
        run = torch.compile(run, fullgraph=True) if found is compiled else run
        scaler = Static(2.0**8)
        for _ in range(20):
            y = torch.randint(0, 4, (8,))
            loss = run(torch.randn(8, 1, 6, 6) + y.view(8, 1, 1, 1), y)
            (loss * scaler.scale).backward()
            optimizer.step(scaler)
            optimizer.zero_grad()
            found.append(loss.item())
    u = torch.finfo(HALVES[half]).eps / 2
    for step, (one, other) in enumerate(zip(eager, compiled, strict=True), 1):
        assert abs(one - other) <= step * 16 * u * max(eager)
    assert eager[-1] < 0.8 * eager[0]  # and it learns


@pytest.mark.slow
def test_one_graph_without_a_first_run() -> None:
    """Traced cold, no rule of an op has been found before: also what torch's functions hide."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    pins, x = {"self_attn": "fp32", "norm2": "half"}, torch.rand(2, 3, 8)
    precision = Precision("mixed", ops=replace(OpLists.named(), modules=pins))
    precision.prepare(model, sgd(model))

    def forward(x):
        held = model(x).masked_fill(x > 0.5, torch.finfo(torch.float32).min)
        y = torch.zeros(2, 3, 8).index_add_(0, torch.tensor([1, 0]), held)
        return F.normalize(1 / (y + 9), dim=-1)

    run = inside(precision, forward)
    assert same_bits([torch.compile(run, fullgraph=True, backend="eager")(x)], [run(x)])


@pytest.mark.parametrize("around", [True, False])
def test_steps_share_one_graph(around) -> None:
    precision, model = Precision("amp", "bfloat16"), nn.Linear(8, 8)
    graphs, optimizer = CompileCounter(), sgd(model)
    run = model if around else inside(precision, model)
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    for _ in range(3):
        with precision.cast() if around else nullcontext():
            compiled(X).float().sum().backward()
        optimizer.step()
    assert graphs.frame_count == 1


def test_blocks_nest_in_a_graph_as_without() -> None:
    outer, bf16, fp32 = Precision("amp"), Precision("amp", "bfloat16"), Precision("fp32")

    def forward(x):
        found = []
        with outer.cast():
            for inner in (outer, bf16, fp32):
                with inner.cast():
                    found.append((x @ x.T).dtype)
            found.append((x @ x.T).dtype)
        return [*found, (x @ x.T).dtype]

    half, wide = torch.float16, torch.float32
    for run in (forward, torch.compile(forward, fullgraph=True, backend="eager")):
        assert run(X) == [half, torch.bfloat16, wide, half, wide]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_roundings_of_emulation_survive_the_compiler(inductor) -> None:
    """Inductor drops casts to half and back, and no op that it cannot look into. 1 + 2^-12 must be
    1, and 300 * 300 must be inf."""
    precision, recorded = Precision("amp", compute="emulated"), AotEagerAndRecordGraphs()
    forward = inside(precision, lambda a, b: F.relu(a @ b) @ a)
    compiled = torch.compile(forward, backend="inductor" if inductor else recorded, fullgraph=True)
    numbers = (1 + 2.0**-12, 300.0, 300.0)
    fine, large, other = (torch.full((4, 4), n, requires_grad=True) for n in numbers)
    assert compiled(fine, large)[0, 0].item() == 4800
    assert compiled(large, other).isinf().all()
    found = [torch.autograd.grad(f(fine, large).float().sum(), fine) for f in (compiled, forward)]
    assert same_bits(*found)
    for graph, *others in () if inductor else (recorded.fw_graphs, recorded.bw_graphs):
        assert "mpframe.convert.default" in {str(node.target) for node in graph.graph.nodes}
        assert not others


def plain(model, x):
    return model(x)


def by_cond(model, x):
    return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: -model(x), (x,))


by_region = torch.compiler.nested_compile_region(plain)
by_checkpoint, by_reentrant = (partial(checkpoint, use_reentrant=own) for own in (False, True))


def found(precision, call, backend, at=""):
    """Result and gradients; the block stands in the compiled function, or around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    run, around = partial(call, model), precision.cast
    if at != "around":
        run, around = inside(precision, run), nullcontext
    run = torch.compile(run, backend=backend, fullgraph=True) if backend else run
    return gradients(model, run, around)


@pytest.mark.parametrize(
    ("call", "at", "backend", "half", "compute"),
    [
        (by_cond, "", None, "float16", "emulated"),
        (by_cond, "inside", "eager", "float16", "emulated"),
        (by_checkpoint, "inside", "aot_eager", "bfloat16", "native"),
        (by_reentrant, "around", "aot_eager", "bfloat16", "native"),
        (by_region, "inside", "aot_eager", "float16", "emulated"),
    ],
)
@pytest.mark.slow
def test_functions_that_an_op_is_given(call, at, backend, half, compute) -> None:
    precision = Precision("amp", half, compute=compute)
    own = found(precision, call, backend, at)
    assert own[0].dtype == HALVES[half]
    assert same_bits(own, found(precision, plain, None))


class Product(torch.autograd.Function):
    """x @ w, with a backward pass that meets the fp32 gradient and half values."""

    @staticmethod
    def forward(ctx, x, w):
        half = F.linear(x, w)
        ctx.save_for_backward(half.relu(), x, w)
        return half.float()

    @staticmethod
    def backward(ctx, gradient):
        positive, x, w = ctx.saved_tensors
        gradient = gradient * (positive > 0)
        return gradient @ w + positive @ w, gradient.t() @ x


def test_the_backward_pass_of_a_custom_function() -> None:
    precision, weight = Precision("amp", "bfloat16", compute="native"), torch.rand(8, 8)
    call, found = inside(precision, lambda x, w: Product.apply(x, w)), []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        x, w = X.clone().requires_grad_(), weight.clone().requires_grad_()
        function(x, w).square().sum().backward()
        found.append([x.grad, w.grad])
    assert same_bits(*found)
