"""A model that asks for fp32 itself: `torch.autocast` regions and `custom_fwd` in `cast()`."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_storage import Reads, prepare
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn
from torch.amp import custom_bwd, custom_fwd
from vocabulary import HALVES, in_another_thread, inside, same_bits

from mpframe import OpLists, Precision
from mpframe.core.casts import outside_casts
from mpframe.precision import policy
from mpframe.precision.handlers import NOT_AUTOCAST

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RUNS = [("float16", "emulated"), ("bfloat16", "native")]
A = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
region = partial(torch.autocast, "cpu")
off = partial(region, enabled=False)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = answers(), torch.is_autocast_cache_enabled()
    yield
    assert (answers(), torch.is_autocast_cache_enabled()) == before
    torch._dynamo.reset()


def answers(device="cpu"):
    return is_autocast_enabled(device), get_autocast_dtype(device)


def product():
    return (A @ A).dtype


class TestAnswers:
    def test_a_block_is_torch_autocast_to_whoever_asks_also_in_a_graph(self) -> None:
        outer, bf16, fp32 = Precision("amp"), Precision("mixed", "bfloat16"), Precision("fp32")

        def ask(x):
            found = []
            with outer.cast():
                for inner in (outer, bf16, fp32):
                    with inner.cast():
                        found.append(((x @ x).dtype, is_autocast_enabled("cpu")))
                found.append(((x @ x).dtype, get_autocast_dtype("cpu")))
            return [*found, (x @ x).dtype]

        expected = [(FP16, True), (BF16, True), (FP32, False), (FP16, FP16), FP32]
        for run in (ask, torch.compile(ask, backend="eager", fullgraph=True)):
            assert run(A) == expected
        with bf16.cast():
            assert answers() == (True, BF16)
            assert answers("cuda") == (False, FP16)  # the model is on a CPU
            assert not in_another_thread(answers)[0]

    def test_a_block_that_casts_nothing(self) -> None:
        blocks = [Precision("fp32"), Precision("fp32", products="mxfp8")]
        blocks += [Precision("amp", ops=OpLists.named("none"))]
        for block in (*(own.cast for own in blocks), outside_casts):
            with block():
                assert not answers()[0]
            with Precision("amp").cast():
                with block():
                    assert (answers()[0], product()) == (False, FP32)
                assert answers() == (True, FP16)

    def test_an_outer_block_sleeps_and_wakes(self) -> None:
        """Also where torch.autocast would do as it does, or does nothing."""
        half, lists = A.half(), OpLists.named().moved({"add": "deny"})
        with Precision("amp", ops=lists).cast():
            with Precision("amp").cast():
                assert (half + half).dtype == FP16
            assert (half + half).dtype == FP32
            with Precision("fp32").cast(), torch.autocast("cpu", FP16):
                assert (half + half).dtype == FP16
            assert (half + half).dtype == FP32

    def test_after_an_exception_and_in_a_block_of_torch_all_is_as_before(self) -> None:
        with Precision("amp").cast():
            with pytest.raises(RuntimeError):
                A @ A[:3]
            assert answers() == (True, FP16)
            with pytest.raises(ArithmeticError), Precision("fp32").cast():
                raise ArithmeticError
            assert (*answers(), product()) == (True, FP16, FP16)
        assert product() == FP32
        with torch.autocast("cpu", BF16):
            for mode, half in (("fp32", BF16), ("amp", FP16)):
                with Precision(mode).cast():
                    assert answers() == (True, half)
            assert answers() == (True, BF16)

    def test_each_half_format_is_judged_by_itself(self, monkeypatch) -> None:
        """A region may choose the one that the CPU has instructions for, or the other one."""
        monkeypatch.setattr(policy, "has_native_half", lambda half: half == "bfloat16")
        for half in HALVES:
            casts = Precision("amp", half)._casts
            assert casts.emulated == {FP16}
        for device, answering in (("cuda", "cuda"), ("meta", "cpu")):  # meta has no autocast.
            casts.compute_on(torch.device(device))
            assert casts.device_type == answering


@pytest.mark.parametrize(("half", "compute"), RUNS)
class TestRegions:
    def test_without_casts_one_in_another(self, half, compute) -> None:
        precision, dtype = Precision("amp", half, compute=compute), HALVES[half]
        with precision.cast():
            assert (off()(product)(), product()) == (FP32, dtype)
            with off():
                assert F.softmax(A.to(dtype), -1).dtype == dtype
                with region():
                    assert product() == dtype
                    with off():
                        assert product() == FP32
                assert product() == FP32
                for again in (precision, Precision("amp", half, compute=compute)):
                    with again.cast():
                        assert product() == dtype
                    assert product() == FP32
            assert product() == dtype

    def test_in_a_format_of_its_own(self, half, compute) -> None:
        other = next(name for name in HALVES if name != half)
        run, inner = (Precision("amp", h, compute=compute) for h in (half, other))
        found = []
        for within in (torch.autocast("cpu", HALVES[other]), inner.cast()):
            v, w = (A.clone().requires_grad_() for _ in range(2))
            with run.cast():
                first = F.linear(A, v)
                with within:
                    second = F.linear(first.float(), v).exp()
                third = F.linear(second, w)
            gradients = torch.autograd.grad(third.float().sum(), (v, w))
            found.append([first, second, third, *gradients])
        assert same_bits(*found)
        assert [t.dtype for t in found[0][:3]] == [HALVES[half], FP32, HALVES[half]]

    def test_half_weights_are_widened_there(self, half, compute) -> None:
        model, wide, narrow = nn.Linear(4, 4), nn.Linear(4, 4), A.to(HALVES[half])
        precision, _ = prepare(model, half=half, compute=compute)
        wide.load_state_dict(model.state_dict())
        assert model.weight.dtype == HALVES[half]
        with precision.cast(), off():
            found = model(A)
            found.sum().backward()
            assert (narrow + A).dtype == FP32
            assert (narrow[0] * narrow[0]).dtype == HALVES[half]
        wide(A).sum().backward()
        assert torch.equal(found, wide(A))
        assert torch.equal(model.weight.grad, wide.weight.grad.to(HALVES[half]))


@pytest.mark.parametrize(
    ("pin", "around", "within", "expected"),
    [
        ("half", off(), nullcontext(), FP16),
        ("fp32", torch.autocast("cpu", BF16), nullcontext(), FP32),
        ("half", torch.autocast("cpu", BF16), nullcontext(), BF16),
        ("none", off(), nullcontext(), FP32),  # It names products alone.
        ("half", nullcontext(), off(), FP32),
        ("fp32", off(), torch.autocast("cpu", BF16), BF16),
    ],
)
def test_the_innermost_of_pins_and_regions_decides(pin, around, within, expected) -> None:
    given = []

    def head(_, x):
        given.append(x)
        with within:
            return product()

    model = nn.ModuleDict({"head": Reads(head), "other": nn.Linear(2, 2)})
    precision = Precision("amp", ops=replace(OpLists.named(), modules={"head": pin}))
    precision.attach(model)
    with precision.cast(), around:
        assert model["head"](A * 1e6) == expected
    if expected == BF16 and pin == "half":
        assert torch.equal(given[0], (A * 1e6).bfloat16())  # float16 would be inf


class Cube(torch.autograd.Function):
    """Marked as torch.amp asks: in fp32, forward and backward."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, x):
        assert (x.dtype, answers()[0]) == (FP32, False)
        ctx.save_for_backward(x)
        return x @ x @ x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        assert (gradients[0] @ x).dtype == FP32
        return gradients[0] @ x


class Unmarked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.seen = product(), answers()
        return x * 1

    @staticmethod
    def backward(ctx, *gradients):
        assert (product(), answers()) == ctx.seen
        return gradients[0]


@pytest.mark.parametrize(("half", "compute"), RUNS)
@pytest.mark.parametrize("function", [Cube, Unmarked])
def test_custom_functions(function, half, compute) -> None:
    def gradient(around, run):
        x = A.clone().requires_grad_()
        with Precision("amp", half, compute=compute).cast(), around:
            y = function.apply(x)
        run(y.sum().backward)
        return x.grad

    for around in (nullcontext(), off(), region(BF16)):
        here = gradient(around, lambda backward: backward())
        assert here.dtype == FP32
        assert torch.equal(here, gradient(around, in_another_thread))


def guarded(region):
    """A region between two products, with products and a norm inside, some of them in a module."""

    def forward(m, x):
        y = m.first(x)
        with torch.autocast("cpu", **region):
            y = m.norm(y.float())
            y = y + y @ y.t() @ y
        return m.last(m.norm(y))

    torch.manual_seed(0)
    norm = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    return Reads(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 8), norm=norm)


def gradients(model, run, casts, backward=None):
    """The result and the gradients, by a backward pass outside of the block, or this one inside."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with casts():
        y = run(x)
        loss = y.float().square().sum()
        if backward:
            backward(loss)
    if not backward:
        loss.backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("way", ["compiled", Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize(
    ("autocast", "mode", "half", "compute"),
    [
        ({"enabled": False}, "mixed", "bfloat16", "emulated"),
        ({"dtype": BF16}, "amp", "float16", "native"),
    ],
)
def test_casts_elsewhere_are_those_of_eager(autocast, mode, half, compute, way) -> None:
    """With ops in a graph, or whose backward pass is in the block."""
    model, precision = guarded(autocast), Precision(mode, half, compute=compute)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    expected = gradients(model, model, precision.cast)
    model.zero_grad()
    if way == "compiled":
        compiled = torch.compile(inside(precision, model), backend="aot_eager", fullgraph=True)
        found = gradients(model, compiled, nullcontext)
    else:
        found = gradients(model, model, precision.cast, way)
    assert same_bits(found, expected)


def test_ops_that_torch_autocast_leaves_alone() -> None:
    """It stays on while they run: nothing of theirs is in its lists, on no device."""
    named = {op.strip("_").removeprefix("r").replace("getitem", "index") for op in NOT_AUTOCAST}
    named |= {"clone", "copy_", "_to_copy", "select", "slice", "index"}
    table = {op for op in torch._C._dispatch_get_all_op_names() if op.startswith("aten::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for device in ("CPU", "CUDA", "MPS", "XPU"):
        cast = {op[len("aten::") :] for op in table if has_kernel(op, f"Autocast{device}")}
        names = {op.partition(".")[0] for op in cast}
        assert names.isdisjoint(named)
        assert "linear" in names
