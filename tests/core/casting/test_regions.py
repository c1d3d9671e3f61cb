"""A model that asks for fp32 itself: `torch.autocast` regions and `custom_fwd` in `cast()`."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
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
RUNS = [("float16", "emulated"), ("bfloat16", "native")]
A = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
off = partial(torch.autocast, "cpu", enabled=False)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = answers(), torch.is_autocast_cache_enabled()
    yield
    assert (answers(), torch.is_autocast_cache_enabled()) == before
    torch._dynamo.reset()


def answers(device: str = "cpu") -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def prepared(model: nn.Module, precision: Precision) -> nn.Module:
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return model


class TestAnswers:
    @pytest.mark.parametrize(("mode", "half"), [("amp", "float16"), ("mixed", "bfloat16")])
    def test_a_block_is_torch_autocast_to_whoever_asks(self, mode: str, half: str) -> None:
        with Precision(mode, half).cast():
            assert answers() == (True, HALVES[half])
            assert not torch.is_autocast_enabled()  # for CUDA: the model is on a CPU
            assert answers("cuda") == (False, FP16)
            assert not in_another_thread(answers)[0]

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
                A @ A[:3]
            assert answers() == (True, FP16)
            with pytest.raises(ArithmeticError), Precision("fp32").cast():
                raise ArithmeticError
            assert answers() == (True, FP16)

    def test_of_a_model_on_another_device(self) -> None:
        casts: Any = Precision("amp")._casts
        for device, answering in (("cuda", "cuda"), ("meta", "cpu")):  # meta has no autocast.
            casts.compute_on(torch.device(device))
            assert casts.device_type == answering

    def test_each_half_format_is_judged_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A region may choose the one that the CPU has instructions for, or the other one."""
        native = "mpframe.core.casting.policy.has_native_half"
        monkeypatch.setattr(native, lambda half: half == "bfloat16")
        for half in HALVES:
            casts: Any = Precision("amp", half)._casts
            assert casts.emulated == {FP16}

    def test_an_outer_block_of_torch_is_not_ours_to_end(self) -> None:
        with torch.autocast("cpu", BF16):
            for mode, half in (("fp32", BF16), ("amp", FP16)):
                with Precision(mode).cast():
                    assert answers() == (True, half)
            assert answers() == (True, BF16)

    def test_by_a_compiled_model(self) -> None:
        precision = Precision("amp", "bfloat16")

        def ask(x: Tensor) -> tuple[Tensor, bool, torch.dtype]:
            with precision.cast():
                return x @ x, *answers()

        assert torch.compile(ask, backend="eager", fullgraph=True)(A)[1:] == (True, BF16)


@pytest.mark.parametrize(("half", "compute"), RUNS)
class TestRegions:
    def test_without_casts(self, half: str, compute: str) -> None:
        @off()
        def decorated() -> Tensor:
            return A @ A

        with Precision("amp", half, compute=compute).cast():
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
            v, w = (A.clone().requires_grad_() for _ in range(2))
            with block:
                first = F.linear(A, v)
                with region:
                    second = F.linear(first.float(), v).exp()
                third = F.linear(second, w)
            return [first, second, third, *torch.autograd.grad(third.float().sum(), (v, w))]

        run, inner = (Precision("amp", h, compute=compute) for h in (half, other))
        found = forward(run.cast(), torch.autocast("cpu", HALVES[other]))
        assert same_bits(found, forward(run.cast(), inner.cast()))
        assert [t.dtype for t in found[:3]] == [HALVES[half], FP32, HALVES[half]]

    def test_regions_nest(self, half: str, compute: str) -> None:
        precision = Precision("amp", half, compute=compute)
        with precision.cast():
            with off():
                with torch.autocast("cpu"):
                    assert (A @ A).dtype == HALVES[half]
                    with off():
                        assert (A @ A).dtype == FP32
                assert (A @ A).dtype == FP32
                for again in (precision, Precision("amp", half, compute=compute)):
                    with again.cast():
                        assert (A @ A).dtype == HALVES[half]
                    assert (A @ A).dtype == FP32
            assert (A @ A).dtype == HALVES[half]

    def test_half_weights_are_widened_there(self, half: str, compute: str) -> None:
        model = prepared(nn.Linear(4, 4), precision := Precision("mixed", half, compute=compute))
        wide, narrow = nn.Linear(4, 4), A.to(HALVES[half])
        wide.load_state_dict(model.state_dict())
        assert model.weight.dtype == HALVES[half]
        with precision.cast(), off():
            found = model(A)
            found.sum().backward()
            assert (narrow + A).dtype == FP32
            assert (narrow[0] * narrow[0]).dtype == HALVES[half]
            heads = F.multi_head_attention_forward(
                A, A, A, 4, 1, torch.rand(12, 4), None, None, None, False, 0.0, narrow, None
            )[0]
        wide(A).sum().backward()
        assert torch.equal(found, wide(A))
        assert torch.equal(model.weight.grad, wide.weight.grad.to(HALVES[half]))
        assert heads.dtype == FP32


@pytest.mark.parametrize(
    ("pin", "outside", "inside", "expected"),
    [
        ("half", off(), nullcontext(), FP16),
        ("fp32", torch.autocast("cpu", BF16), nullcontext(), FP32),
        ("half", torch.autocast("cpu", BF16), nullcontext(), BF16),
        ("none", off(), nullcontext(), FP32),  # It names products alone.
        ("half", nullcontext(), off(), FP32),
        ("fp32", off(), torch.autocast("cpu", BF16), BF16),
    ],
)
def test_the_innermost_of_pins_and_regions_decides(
    pin: str, outside: Any, inside: Any, expected: torch.dtype
) -> None:
    given = []

    class Head(nn.Module):
        def forward(self, x: Tensor) -> torch.dtype:
            given.append(x)
            with inside:
                return (A @ A).dtype

    model = nn.ModuleDict({"head": Head(), "other": nn.Linear(2, 2)})
    precision = Precision("amp", ops=replace(OpLists.named(), modules={"head": pin}))
    precision.attach(model)
    with precision.cast(), outside:
        assert model["head"](A * 1e6) == expected
    if expected == BF16 and pin == "half":
        assert torch.equal(given[0], (A * 1e6).bfloat16())  # float16 would be inf


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


class Unmarked(torch.autograd.Function):
    """Under the autocast of its caller, forward and backward."""

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


class Square(Unmarked):
    forward = staticmethod(custom_fwd(Unmarked.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Unmarked.backward, device_type="cpu"))


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


class Guarded(nn.Module):
    """A region between two products, with products and a norm inside, some of them in a module."""

    def __init__(self, region: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", **self.region):
            y = self.norm(y.float())
            y = y + y @ y.t() @ y
        return self.last(self.norm(y))


def gradients(
    model: nn.Module, run: Callable[..., Tensor], around: Any = nullcontext, inside: Any = None
) -> Any:
    """The result and the gradients, by a backward pass outside of the block, or by `inside`."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with around():
        y = run(x)
        loss = y.float().square().sum()
        if inside is not None:
            inside(loss)
    if inside is None:
        loss.backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


OFF, IN_BF16, IN_FP16 = {"enabled": False}, {"dtype": BF16}, {"dtype": FP16}


class TestElsewhere:
    """A region's casts are those of eager mode where its ops run again, or in a graph."""

    @pytest.mark.parametrize(("pieces", "use_reentrant"), [(False, True), (True, False)])
    @pytest.mark.parametrize(
        ("region", "mode", "half", "compute"),
        [
            (OFF, "amp", "float16", "emulated"),
            (OFF, "mixed", "bfloat16", "native"),
            (IN_BF16, "amp", "float16", "native"),
            (IN_FP16, "mixed", "bfloat16", "emulated"),
        ],
    )
    def test_recomputed(
        self, region: Any, mode: str, half: str, compute: str, pieces: bool, use_reentrant: bool
    ) -> None:
        precision = Precision(mode, half, compute=compute)
        again = partial(checkpoint, use_reentrant=use_reentrant)
        model: Any = prepared(Guarded(region), precision)
        expected = gradients(model, model, precision.cast)
        model: Any = prepared(Guarded(region), precision)
        run = partial(again, model)
        if pieces:  # The checkpoint begins inside of the region.
            run, model.norm.forward = model, partial(again, model.norm.forward)
        assert same_bits(gradients(model, run, precision.cast), expected)

    @pytest.mark.parametrize(
        ("region", "mode", "half", "compute", "backend", "at"),
        [
            (OFF, "amp", "float16", "emulated", "aot_eager", "inside"),
            (OFF, "mixed", "bfloat16", "native", "eager", "around"),
            (IN_BF16, "amp", "float16", "native", "aot_eager", "around"),
            (IN_FP16, "mixed", "bfloat16", "emulated", "eager", "inside"),
        ],
    )
    def test_compiled(
        self, region: Any, mode: str, half: str, compute: str, backend: str, at: str
    ) -> None:
        precision = Precision(mode, half, compute=compute)
        model = prepared(Guarded(region), precision)
        expected = gradients(model, model, precision.cast)
        model = prepared(Guarded(region), precision)

        def in_block(x: Tensor) -> Tensor:
            with precision.cast():
                return model(x)  # type: ignore[no-any-return]

        around = precision.cast if at == "around" else nullcontext
        compiled = torch.compile(
            model if at == "around" else in_block, backend=backend, fullgraph=True
        )
        assert same_bits(gradients(model, compiled, around), expected)

    @pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
    @pytest.mark.parametrize(
        ("region", "mode", "half"), [(OFF, "amp", "float16"), (IN_FP16, "mixed", "bfloat16")]
    )
    def test_a_backward_pass_in_the_block(
        self, region: Any, mode: str, half: str, backward: Any
    ) -> None:
        precision = Precision(mode, half)
        model = prepared(Guarded(region), precision)
        expected = gradients(model, model, precision.cast)
        model = prepared(Guarded(region), precision)
        assert same_bits(gradients(model, model, precision.cast, backward), expected)


def test_products_are_not_quantised_in_a_region() -> None:
    x, precision = torch.rand(32, 32), Precision("amp", "bfloat16", products="mxfp8")
    with precision.cast():
        narrow = F.linear(x, x)
        with off():
            wide = F.linear(x, x)
    assert torch.equal(wide, F.linear(x, x))
    assert not torch.equal(narrow, F.linear(x.bfloat16(), x.bfloat16()))


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
