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

from mpframe import OpLists, Precision

X = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


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
