"""A model that asks for fp32 itself: `torch.autocast` regions and `custom_fwd` in `cast()`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint
from vocabulary import HALVES, in_another_thread, same_bits

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe import OpLists, Precision
from mpframe.core.casting.handlers import NOT_AUTOCAST
from mpframe.core.objective import outside_casts

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RUNS = [(half, compute) for half in HALVES for compute in ("emulated", "native")]
A = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
off = partial(torch.autocast, "cpu", enabled=False)
Answers = tuple[bool, torch.dtype]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = answers(), torch.is_autocast_cache_enabled()
    yield
    assert (answers(), torch.is_autocast_cache_enabled()) == before
    torch._dynamo.reset()


def answers(device: str = "cpu") -> Answers:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def pinned(half: str = "float16", **modules: str) -> Precision:
    lists = OpLists.named()
    ops = OpLists(lists.allow, lists.deny, lists.infer, modules)
    return Precision("amp", half, ops=ops)


def prepared(model: nn.Module, precision: Precision) -> nn.Module:
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return model


class TestAnswers:
    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("mode", ["amp", "mixed"])
    def test_a_block_is_torch_autocast_to_whoever_asks(self, mode: str, half: str) -> None:
        with Precision(mode, half).cast():
            assert answers() == (True, HALVES[half])
            assert torch.autocast("cpu").fast_dtype == HALVES[half]
            assert not torch.is_autocast_enabled()  # for CUDA: the model is on a CPU
            assert answers("cuda") == (False, FP16)

    @pytest.mark.parametrize(
        "block",
        [
            Precision("fp32").cast,
            Precision("amp", ops=OpLists.named("none")).cast,
            outside_casts,
            Precision("fp32", products="mxfp8").cast,
        ],
    )
    def test_a_block_that_casts_nothing(self, block: Any) -> None:
        with block():
            assert not answers()[0]
        with Precision("amp").cast():
            with block():
                assert not answers()[0]
                assert (A @ A).dtype == FP32
            assert answers() == (True, FP16)

    def test_blocks_nest(self) -> None:
        with Precision("amp").cast():
            with Precision("amp", "bfloat16").cast():
                assert answers() == (True, BF16)
            assert answers() == (True, FP16)

    def test_an_outer_block_sleeps_and_wakes(self) -> None:
        """Also where torch.autocast would do as it does, or does nothing."""
        lists, half = OpLists.named(), A.half()
        with Precision("amp", ops=lists.moved({"add": "deny"})).cast():
            with Precision("amp").cast():
                assert (half + half).dtype == FP16
            assert (half + half).dtype == FP32
            with Precision("fp32").cast(), torch.autocast("cpu", FP16):
                assert (half + half).dtype == FP16
            assert (half + half).dtype == FP32

    def test_after_an_exception(self) -> None:
        with Precision("amp").cast():
            with pytest.raises(RuntimeError):
                A @ torch.rand(3, 3)
            assert answers() == (True, FP16)
            with pytest.raises(ArithmeticError), Precision("fp32").cast():
                raise ArithmeticError
            assert answers() == (True, FP16)

    def test_another_thread(self) -> None:
        with Precision("amp").cast():
            assert not in_another_thread(answers)[0]

    def test_of_a_model_on_another_device(self) -> None:
        precision = Precision("amp")
        assert precision._casts is not None
        precision._casts.compute_on(torch.device("cuda"))
        assert precision._casts.device_type == "cuda"
        precision._casts.compute_on(torch.device("meta"))  # has no autocast
        assert precision._casts.device_type == "cpu"

    def test_an_outer_block_of_torch_is_not_ours_to_end(self) -> None:
        with torch.autocast("cpu", BF16):
            with Precision("fp32").cast():
                assert answers() == (True, BF16)
            with Precision("amp").cast():
                assert answers() == (True, FP16)
            assert answers() == (True, BF16)


@pytest.mark.parametrize(("half", "compute"), RUNS)
class TestRegions:
    def test_without_casts(self, half: str, compute: str) -> None:
        precision = Precision("amp", half, compute=compute)

        @off()
        def decorated() -> Tensor:
            return A @ A

        with precision.cast():
            with off():
                inside = A @ A, F.linear(A, A), F.softmax(A.to(HALVES[half]), -1)
            after = A @ A
            found = decorated()
        assert [t.dtype for t in inside] == [FP32, FP32, HALVES[half]]
        assert same_bits([*inside[:2], found], [A @ A, F.linear(A, A), A @ A])
        assert after.dtype == HALVES[half]

    def test_in_a_format_of_its_own(self, half: str, compute: str) -> None:
        other = next(name for name in HALVES if name != half)

        def forward(block: Any, region: Any) -> list[Tensor]:
            u, v, w = (A.clone().requires_grad_() for _ in range(3))
            with block:
                first = F.linear(A, u)
                with region:
                    second = F.linear(first.float(), v).exp()
                third = F.linear(second, w)
            return [first, second, third, *torch.autograd.grad(third.float().sum(), (u, v, w))]

        run, inner = (Precision("amp", h, compute=compute) for h in (half, other))
        found = forward(run.cast(), torch.autocast("cpu", HALVES[other]))
        assert same_bits(found, forward(run.cast(), inner.cast()))
        assert [t.dtype for t in found[:3]] == [HALVES[half], FP32, HALVES[half]]

    def test_regions_nest(self, half: str, compute: str) -> None:
        with Precision("amp", half, compute=compute).cast():
            with off():
                with torch.autocast("cpu"):
                    assert (A @ A).dtype == HALVES[half]
                    with off():
                        assert (A @ A).dtype == FP32
                assert (A @ A).dtype == FP32
                with Precision("amp", half, compute=compute).cast():
                    assert (A @ A).dtype == HALVES[half]
            assert (A @ A).dtype == HALVES[half]

    def test_the_same_block_again_in_a_region(self, half: str, compute: str) -> None:
        precision = Precision("amp", half, compute=compute)
        with precision.cast(), off():
            with precision.cast():
                assert (A @ A).dtype == HALVES[half]
            assert (A @ A).dtype == FP32

    def test_half_weights_are_widened_there(self, half: str, compute: str) -> None:
        model = prepared(nn.Linear(4, 4), precision := Precision("mixed", half, compute=compute))
        wide = nn.Linear(4, 4)
        wide.load_state_dict(model.state_dict())
        assert model.weight.dtype == HALVES[half]
        with precision.cast(), off():
            found = model(A)
            found.sum().backward()
            assert (A.to(HALVES[half]) + A).dtype == FP32
            assert (A[0].to(HALVES[half]) * A[0].to(HALVES[half])).dtype == HALVES[half]
            heads = F.multi_head_attention_forward(
                A, A, A, 4, 1, torch.rand(12, 4), None, None, None, False, 0.0, A.to(HALVES[half]),
                None
            )[0]  # fmt: skip
        wide(A).sum().backward()
        assert torch.equal(found, wide(A))
        assert torch.equal(model.weight.grad, wide.weight.grad.to(HALVES[half]))
        assert heads.dtype == FP32


class TestPins:
    """The innermost decides: the module's pin, or the model's region."""

    def dtype_in(self, pin: str, outside: Any, inside: Any, half: str = "float16") -> torch.dtype:
        class Head(nn.Module):
            def forward(self, x: Tensor) -> torch.dtype:
                with inside:
                    return (A @ A).dtype

        model = nn.ModuleDict({"head": Head(), "other": nn.Linear(2, 2)})
        precision = pinned(half, head=pin)
        precision.attach(model)
        with precision.cast(), outside:
            return model["head"](A)  # type: ignore[no-any-return]

    def test_a_pin_in_a_region(self) -> None:
        assert self.dtype_in("half", off(), nullcontext()) == FP16
        assert self.dtype_in("fp32", torch.autocast("cpu", BF16), nullcontext()) == FP32
        assert self.dtype_in("half", torch.autocast("cpu", BF16), nullcontext()) == BF16
        assert self.dtype_in("none", off(), nullcontext()) == FP32  # It names products alone.

    def test_a_region_in_a_pinned_module(self) -> None:
        assert self.dtype_in("half", nullcontext(), off()) == FP32
        assert self.dtype_in("fp32", off(), torch.autocast("cpu", BF16)) == BF16

    def test_what_a_module_pinned_to_half_is_given_in_a_region_of_another_half(self) -> None:
        model = nn.Sequential(nn.Identity())
        precision = pinned(**{"0": "half"})
        precision.attach(model)
        with precision.cast(), torch.autocast("cpu", BF16):
            assert torch.equal(model(A * 1e6), (A * 1e6).bfloat16())  # float16 would be inf


class Cube(torch.autograd.Function):
    """Marked as torch.amp asks: in fp32, forward and backward."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert (x.dtype, answers()[0]) == (FP32, False)
        ctx.save_for_backward(x)
        return x @ x @ x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert (gradients[0] @ x).dtype == FP32
        return gradients[0] @ x


class Square(torch.autograd.Function):
    """Marked: under the autocast of its caller, forward and backward."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seen = (x @ x).dtype
        return (x @ x).float()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert (x @ x).dtype == ctx.seen
        return (gradients[0] @ x).float()


class Unmarked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seen = (x @ x).dtype, answers()
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert ((x @ x).dtype, answers()) == ctx.seen
        return gradients[0]


@pytest.mark.parametrize(("half", "compute"), RUNS)
@pytest.mark.parametrize("function", [Cube, Square, Unmarked])
@pytest.mark.parametrize("region", [nullcontext, off, partial(torch.autocast, "cpu", BF16)])
def test_custom_functions(function: Any, region: Any, half: str, compute: str) -> None:
    def gradient(x: Tensor, run: Callable[[Callable[[], None]], object]) -> Tensor:
        with Precision("amp", half, compute=compute).cast(), region():
            y = function.apply(x)
        run(y.sum().backward)
        assert x.grad is not None
        return x.grad

    here = gradient(A.clone().requires_grad_(), lambda backward: backward())
    assert here.dtype == FP32
    assert torch.equal(here, gradient(A.clone().requires_grad_(), in_another_thread))


class Rope(nn.Module):
    """As transformers computes rotary embeddings, behind products and before attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("inv_freq", 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(1024)[None, None, :].float()
        maybe = off() if torch.is_autocast_enabled("cpu") else nullcontext()
        with maybe:
            freqs = (self.inv_freq[None, :, None].float() @ positions.float()).transpose(1, 2)
            angle = torch.cat((freqs, freqs), -1)
            cos, sin = angle.cos(), angle.sin()
        return cos.to(x.dtype), sin.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        cos, sin = self.angles(q)
        q, k = (t * cos + torch.cat((-t[..., 8:], t[..., :8]), -1) * sin for t in (q, k))
        return F.scaled_dot_product_attention(q, k, x.to(q.dtype))


@pytest.mark.parametrize("mode", ["amp", "mixed"])
@pytest.mark.parametrize(("half", "compute"), RUNS)
def test_rotary_embeddings(mode: str, half: str, compute: str) -> None:
    precision, model, x = Precision(mode, half, compute=compute), Rope(), torch.rand(1, 1024, 16)
    exact = model.angles(x)
    prepared(model, precision)
    with precision.cast():
        assert same_bits(model.angles(x), exact)
        assert model(x).dtype == HALVES[half]


@pytest.mark.parametrize("mode", ["amp", "mixed"])
def test_rotary_embeddings_as_under_torch_autocast(mode: str) -> None:
    x = torch.rand(1, 1024, 16)

    def result(block: AbstractContextManager[Any], model: nn.Module) -> list[Tensor]:
        with block:
            y = model(x)
        y.float().square().mean().backward()
        return [y, *(p.grad.float() for p in model.parameters() if p.grad is not None)]

    precision = Precision(mode, "bfloat16", compute="native")
    found = result(precision.cast(), prepared(Rope(), precision))
    assert same_bits(found, result(torch.autocast("cpu", BF16), prepared(Rope(), Precision())))


REGIONS: list[dict[str, Any]] = [{"enabled": False}, {"dtype": BF16}, {"dtype": FP16}]


class Guarded(nn.Module):
    """A region between two products, and products and a norm inside."""

    def __init__(self, region: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", **self.region):
            y = self.norm(y.float())
            y = y + y @ y.t() @ y
        return self.last(self.norm(y))


def gradients(model: nn.Module, run: Callable[..., Tensor], around: Any = nullcontext) -> Any:
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with around():
        y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("mode", ["amp", "mixed"])
@pytest.mark.parametrize(("half", "compute"), RUNS)
@pytest.mark.parametrize("region", REGIONS)
class TestElsewhere:
    def eager(self, region: Any, precision: Precision) -> Any:
        model = prepared(Guarded(region), precision)
        return gradients(model, model, precision.cast)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("pieces", [False, True])
    def test_recomputed(
        self, region: Any, half: str, compute: str, mode: str, use_reentrant: bool, pieces: bool
    ) -> None:
        precision = Precision(mode, half, compute=compute)
        model = prepared(Guarded(region), precision)
        run = partial(checkpoint, use_reentrant=use_reentrant)
        if pieces:  # The checkpoint begins inside of the region.
            norm = model.norm.forward
            model.norm.forward = lambda x: run(norm, x) @ torch.eye(8)

            def plain(x: Tensor) -> Tensor:
                return norm(x) @ torch.eye(8)

            found = gradients(model, model, precision.cast)
            for p in model.parameters():
                p.grad = None
            model.norm.forward = plain
            assert same_bits(found, gradients(model, model, precision.cast))
            return
        found = gradients(model, partial(run, model), precision.cast)
        assert same_bits(found, self.eager(region, precision))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("at", ["inside", "around"])
    def test_compiled(
        self, region: Any, half: str, compute: str, mode: str, backend: str, at: str
    ) -> None:
        precision = Precision(mode, half, compute=compute)
        model = prepared(Guarded(region), precision)

        def in_block(x: Tensor) -> Tensor:
            with precision.cast():
                return model(x)  # type: ignore[no-any-return]

        compiled = torch.compile(
            model if at == "around" else in_block, backend=backend, fullgraph=True
        )
        found = gradients(model, compiled, precision.cast if at == "around" else nullcontext)
        assert same_bits(found, self.eager(region, precision))

    def test_a_backward_pass_in_the_block(
        self, region: Any, half: str, compute: str, mode: str
    ) -> None:
        precision = Precision(mode, half, compute=compute)
        for backward in (Tensor.backward, torch.autograd.backward):
            model = prepared(Guarded(region), precision)
            x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            with precision.cast():
                y = model(x)
                backward(y.float().square().sum())  # type: ignore[operator]
            found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
            assert same_bits(found, self.eager(region, precision))


def test_a_compiled_model_is_compiled_once() -> None:
    precision, model = Precision("amp", "bfloat16"), Guarded({"enabled": False})
    compiled_graphs = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        with precision.cast():
            compiled(torch.rand(4, 8)).float().sum().backward()
    assert len(compiled_graphs) == 1


def test_a_compiled_model_that_asks() -> None:
    precision = Precision("amp", "bfloat16")

    def ask(x: Tensor) -> tuple[Tensor, bool, torch.dtype]:
        with precision.cast():
            return x @ x, *answers()

    assert torch.compile(ask, backend="eager", fullgraph=True)(A)[1:] == (True, BF16)


def test_products_are_not_quantised_in_a_region() -> None:
    precision = Precision("amp", "bfloat16", products="mxfp8")
    x = torch.rand(32, 32, requires_grad=True)
    with precision.cast():
        narrow = F.linear(x, x)
        with off():
            wide = F.linear(x, x)
    assert torch.equal(wide, F.linear(x, x))
    assert not torch.equal(narrow.float(), F.linear(x.bfloat16(), x.bfloat16()).float())


def test_ops_that_torch_autocast_leaves_alone() -> None:
    """It stays on while they run: nothing of theirs is in its lists, on no device."""
    named = {op.strip("_").removeprefix("r").replace("getitem", "index") for op in NOT_AUTOCAST}
    table = {op for op in torch._C._dispatch_get_all_op_names() if op.startswith("aten::")}
    for device in ("CPU", "CUDA", "MPS", "XPU"):
        cast = {
            op.removeprefix("aten::").split(".")[0]
            for op in table
            if torch._C._dispatch_has_kernel_for_dispatch_key(op, f"Autocast{device}")
        }
        assert cast.isdisjoint(named | {"clone", "copy_", "_to_copy", "select", "slice", "index"})
    assert "linear" in cast
