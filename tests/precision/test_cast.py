"""A block: which casts of weights it keeps, beside those of other threads, and compiled."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from test_regions import gradients
from test_storage import prepare
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from vocabulary import HALVES, Kernels, in_another_thread, inside, same_bits

from mpframe import OpLists, Precision

FP32, HALF = torch.float32, torch.float16
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def amp(half="float16", compute="auto"):
    return Precision("amp", half, compute=compute)


def test_without_lists_a_pinned_module_gives_half_to_the_next() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    precision, _ = prepare(model, ops=OpLists(modules={"1": "fp32"}))
    assert inside(precision, model)(X.half()).dtype == HALF


def weight_of(value=1.0):
    return nn.Parameter(torch.full((1, 1), value)), torch.ones(1, 1)


class TestWeightsOfABlock:
    """One weight is cast once in a block, and never used when it is older than its weight."""

    @pytest.mark.parametrize("compute", ["native", "emulated"])
    def test_frozen_in_the_block_it_has_no_gradient_from_then_on(self, compute) -> None:
        """A discriminator that judges for the generator, in one block with its own step."""
        weight, x = weight_of()
        with amp("bfloat16", compute).cast():
            F.linear(x, weight)
            weight.requires_grad_(False)
            frozen = F.linear(x.requires_grad_(), weight)
            weight.requires_grad_(True)
            trained = F.linear(x, weight)
        frozen.sum().backward()
        assert weight.grad is None
        trained.sum().backward()
        assert weight.grad == 1

    @pytest.mark.parametrize("half", HALVES)
    def test_cast_once_also_after_a_block_in_which_it_was_written(self, half) -> None:
        weight, x, precision = nn.Parameter(X.clone()), X.to(HALVES[half]), amp(half, "native")
        for _ in range(2):
            with precision.cast():
                weight.data.fill_(2.0)
            with Kernels() as kernels, precision.cast():
                for _ in range(5):
                    F.linear(x, weight)
            assert sum(kernel.name == "_to_copy" for kernel in kernels.ran) == 1

    def test_writes_before_and_within_a_block_are_seen(self) -> None:
        (weight, x), precision = weight_of(5.0), amp()
        with torch.inference_mode(), precision.cast():
            y = F.linear(x, weight)
        assert (y.dtype, y.item()) == (HALF, 5.0)
        weight.data.fill_(1.0)
        with precision.cast():
            assert F.linear(x, weight).item() == 1.0
            nn.init.zeros_(weight)
            assert F.linear(x, weight).item() == 0.0
            values = weight.data
            for value in (2.0, 3.0):
                values.fill_(value)
                assert F.linear(x, weight).item() == value
            weight.data = torch.full((1, 1), 4.0)
            assert F.linear(x, weight).item() == 4.0

    @pytest.mark.parametrize("run", [lambda step: step(), in_another_thread])
    @pytest.mark.parametrize(
        ("kind", "fused", "half"),
        [("SGD", False, "float16"), ("SGD", True, "bfloat16"), ("AdamW", True, "float16")],
    )
    def test_an_optimizer_is_seen(self, kind, fused, half, run) -> None:
        """The kernels of fused ones write without raising the version counter."""
        weight, x = weight_of()
        optimizer = getattr(torch.optim, kind)([weight], lr=0.5, fused=fused)
        with amp(half).cast():
            F.linear(x, weight).sum().backward()
            run(optimizer.step)
            assert weight.item() < 1
            assert torch.equal(F.linear(x, weight), weight.detach().to(HALVES[half]))

    def test_a_cast_without_a_graph_is_not_used_with_one(self) -> None:
        weight, x = weight_of()
        with amp().cast():
            with torch.no_grad():
                F.linear(x, weight)
            F.linear(x, weight).backward()
        assert weight.grad is not None

    @torch.no_grad()
    def test_a_new_weight_at_an_old_address_is_another(self) -> None:
        """Without a graph nothing else keeps a weight alive."""
        with amp().cast():
            for value in range(50):
                weight, x = weight_of(float(value))
                assert F.linear(x, weight).item() == value
                del weight


@pytest.mark.parametrize("first_out", [True, False])
def test_blocks_of_two_threads_overlap_and_end_on_their_own(first_out) -> None:
    """Whether casts are on is a matter of the present thread, also in a pinned module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = Precision("amp", ops=replace(OpLists.named(), modules={"1": "fp32"}))
    precision.attach(model)
    opened, leave = Event(), Event()

    def formats():
        return [model[0](X).dtype, model(X).dtype]

    def hold(*_) -> None:
        with Precision("fp32").cast():
            opened.set()
            leave.wait(10)

    def run():
        outside, hook = formats(), model[1].register_forward_pre_hook(hold)
        with precision.cast():
            model(X)
            hook.remove()
            return outside, formats()

    with ThreadPoolExecutor(1) as threads:
        with precision.cast():
            other = threads.submit(run)
            opened.wait(10)
            if not first_out:
                leave.set()
                other.result()
            assert model[0](X).dtype == HALF
            assert X.half().softmax(-1).dtype == FP32  # torch's autocast would leave it.
        leave.set()
        assert other.result() == ([FP32, FP32], [HALF, FP32])
    assert formats() == [FP32, FP32]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


@pytest.mark.parametrize("around", [True, False])
def test_steps_share_one_graph(around) -> None:
    precision, model = amp("bfloat16"), nn.Linear(4, 4)
    graphs, optimizer = CompileCounter(), sgd(model)
    run = model if around else inside(precision, model)
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    for _ in range(3):
        with precision.cast() if around else nullcontext():
            compiled(X).float().sum().backward()
        optimizer.step()
    assert graphs.frame_count == 1


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


def found(precision, call, backend):
    """Result and gradients; the block stands in the compiled function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    run = inside(precision, partial(call, model))
    run = torch.compile(run, backend=backend, fullgraph=True) if backend else run
    return gradients(model, run, nullcontext)


@pytest.mark.parametrize(
    ("call", "backend"), [(by_cond, None), (by_cond, "eager"), (by_region, "aot_eager")]
)
@pytest.mark.slow
def test_functions_that_an_op_is_given(call, backend) -> None:
    precision = Precision("amp", compute="emulated")
    own = found(precision, call, backend)
    assert own[0].dtype == HALF
    assert same_bits(own, found(precision, plain, None))
