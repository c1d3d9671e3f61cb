"""Emulated half against its definition, bit for bit, forward and backward.

    y  = round_to_half(op(fp32(x_half), ...))
    dx = round_to_half(d op(fp32(x_half), ...) . fp32(dy_half))

The reference below is written in plain fp32 torch with explicit roundings; it shares nothing with
the package.
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import HELPERS
from op_table import TABLE, Spelling
from test_listed_ops import LISTS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from vocabulary import HALVES, Kernel, Kernels, same_bits, tensors

from mpframe import Precision
from mpframe.core.casting.emulation import half_values, is_faulty, round_to
from mpframe.core.casting.policy import has_native_half

ALLOWED = set().union(*(lists.allow for lists in LISTS.values()))
FAULTY_IN = "2.15.0"  # The newest torch whose kernels for `FAULTY` were seen to be wrong.


def scaled(inputs: Any, factor: float, dtype: torch.dtype) -> Any:
    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return (leaf * factor).to(dtype).requires_grad_() if floating else leaf

    return tree_map(convert, inputs)


def leaves(inputs: Any) -> list[Tensor]:
    return [t for t in tensors(inputs) if t.requires_grad]


def differentiable(result: Any) -> list[Tensor]:
    return [t for t in tensors(result) if t.requires_grad]


def seeds_for(results: Sequence[Tensor], half: torch.dtype) -> list[Tensor]:
    """Incoming gradients, exact in half."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(r.shape, generator=generator).to(half) for r in results]


def reference(
    spelling: Spelling, inputs: Any, half: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients by definition; `inputs` hold values of `half`, as fp32."""
    results = differentiable(spelling(*inputs))
    incoming = [seed.float() for seed in seeds_for(results, half)]
    gradients = torch.autograd.grad(results, leaves(inputs), incoming, allow_unused=True)
    return [r.to(half) for r in results], [g.to(half) for g in gradients if g is not None]


def emulated(
    spelling: Spelling, inputs: Any, precision: Precision
) -> tuple[list[Tensor], list[Tensor]]:
    with precision.cast():
        results = differentiable(spelling(*inputs))
    incoming = seeds_for(results, precision.policy.half_dtype)
    gradients = torch.autograd.grad(results, leaves(inputs), incoming, allow_unused=True)
    return results, [g for g in gradients if g is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "half", "scale"),
    [
        ("mixed", "bfloat16", 1.0),
        ("amp", "bfloat16", 1.0),
        ("amp", "float16", 2.0**-12),  # small enough for subnormal results
        ("amp", "float16", 2.0**9),  # large enough for results beyond the range of float16
    ],
)
def test_every_half_op_is_what_the_definition_says(mode: str, half: str, scale: float) -> None:
    dtype, wrong = HALVES[half], []
    for op in sorted(ALLOWED):
        lists = next(lists for lists in LISTS.values() if op in lists.allow)
        precision = Precision(mode, half, ops=lists, compute="emulated")
        exact = scaled(TABLE[op].inputs, scale, dtype)
        as_fp32 = scaled(exact, 1.0, torch.float32)
        given = exact if mode == "mixed" else scaled(TABLE[op].inputs, scale, torch.float32)
        for spelling in TABLE[op].spellings:
            results, gradients = emulated(spelling, given, precision)
            by_definition, their_gradients = reference(spelling, as_fp32, dtype)
            # fp32 weights get the rounded gradient, widened.
            widened = [g.to(leaves(given)[0].dtype) for g in their_gradients]
            if not same_bits([*results, *gradients], [*by_definition, *widened]):
                wrong.append(op)
    assert wrong == []


def test_one_rounding_after_sums_in_fp32() -> None:
    """float16 ends at 65504, and 65520 is the first number that rounds to inf; its least is 2^-24,
    half of which rounds to even, to 0. A running sum of ones in float16 would stop at 2048."""
    ones = torch.ones(1, 4096)
    with Precision("amp", compute="emulated").cast():
        products = [
            torch.full((1, 1), a) @ torch.full((1, 1), b)
            for a, b in ((1.0, 65519.0), (1.0, 65520.0), (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-13))
        ]
        sums = [ones @ ones.T, torch.full((1, 2), 40000.0) @ torch.ones(2, 1)]
    assert [p.item() for p in products] == [65504, math.inf, 2.0**-24, 0]
    assert [s.item() for s in sums] == [4096, math.inf]


def test_rounding_helpers() -> None:
    x, half = torch.tensor([1 + 2.0**-12, 1e-3, -70000.0, float("nan")]), torch.float16
    assert same_bits([half_values(x, half), round_to(x, half)], [x.half().float(), x.half()])
    assert round_to(torch.arange(3), half).dtype == torch.int64


class TestAWeightUsedAgain:
    """The gradients of its uses add in half, one after another, as they do on a device."""

    @pytest.mark.parametrize("mode", ["amp", "mixed"])
    def test_its_gradients_add_as_native_ones_do(self, mode: str) -> None:
        """300 ones: in bfloat16 the running sum stops at 256, for 256 + 1 rounds to 256."""
        ones = [1.0] * 300
        emulated, native = (_gradient(mode, "bfloat16", c, ones) for c in ("emulated", "native"))
        assert emulated == native == 256

    @pytest.mark.parametrize("mode", ["amp", "mixed"])
    def test_their_sum_overflows(self, mode: str) -> None:
        """Each gradient is within float16, and so is their sum, 0; a sum on the way is not."""
        gradient = _gradient(mode, "float16", "emulated", [6e4, 6e4, -6e4, -6e4])
        assert not math.isfinite(gradient)

    @pytest.mark.parametrize(("half", "uses"), [("bfloat16", 2), ("float16", 40)])
    def test_each_gradient_is_rounded_before_it_is_added(self, half: str, uses: int) -> None:
        torch.manual_seed(0)
        weight, inputs = nn.Parameter(torch.randn(3, 5)), torch.randn(uses, 4, 5)
        with Precision("amp", half, compute="emulated").cast():
            uses_of_it = [nn.functional.linear(x, weight) for x in inputs]
            torch.stack(uses_of_it).float().sum().backward()
        # The engine runs the last use first.
        ones, total = torch.ones(3, 4), torch.zeros(3, 5, dtype=HALVES[half])
        for x in reversed(inputs.to(HALVES[half])):
            total = total + (ones @ x.float()).to(HALVES[half])
        assert weight.grad is not None
        assert same_bits([weight.grad], [total.float()])

    def test_all_uses_share_its_memory(self) -> None:
        weight, seen = nn.Parameter(torch.ones(3, 3)), []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t),
            Precision("amp", compute="emulated").cast(),
        ):
            x = torch.ones(1, 3, requires_grad=True)
            for _ in range(5):
                x = nn.functional.linear(x, weight)
        widened = {t.data_ptr() for t in seen if t.shape == (3, 3)}
        assert len(widened) == 1

    @pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in forward mode
    def test_transforms_of_functions_see_every_use(self) -> None:
        """Values and derivatives that float16 holds exactly: f(w) = (w w x)^T 1 + (w x)^T 1."""
        x, ones = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)

        def total(weight: Tensor) -> Tensor:
            with Precision("amp", compute="emulated").cast():
                once = nn.functional.linear(x, weight)
                return (nn.functional.linear(once, weight) + once).float().sum()

        def exactly(weight: Tensor) -> Tensor:
            return ((x @ weight.T @ weight.T + x @ weight.T) * ones).sum()

        weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
            assert torch.equal(transform(total)(weight), transform(exactly)(weight))
        many = torch.stack([weight, -weight])
        by_row = [torch.func.vmap(torch.func.grad(f))(many) for f in (total, exactly)]
        assert torch.equal(*by_row)


def _gradient(mode: str, half: str, compute: str, gradients: list[float]) -> float:
    """The gradient of a weight of one number, each use of which has one of `gradients`."""
    model = nn.Linear(1, 1, bias=False)
    precision = Precision(mode, half, compute=compute)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with precision.cast():
        torch.stack([model(torch.full((1, 1), x)) for x in gradients]).float().sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


# Along some axis the kernel lies wholly inside at no position; by op, shapes and settings.
FAULTY_CALLS = [
    ("conv3d", (2, 6, 6), (3, 3, 3), {"padding": 1}),
    ("conv3d", (6, 1, 6), (1, 5, 1), {"padding": (0, 2, 0)}),
    ("conv3d", (5, 4, 4), (5, 2, 2), {"padding": (1, 0, 0), "stride": (2, 1, 1)}),
    ("conv3d", (4, 6, 6), (3, 3, 3), {"padding": (2, 1, 1), "dilation": (2, 1, 1)}),
    ("conv_transpose3d", (2, 5, 5), (7, 2, 5), {"padding": (3, 1, 2), "stride": (2, 2, 1)}),
    ("conv2d", (1, 6), (5, 3), {"padding": (2, 1), "stride": 2}),
    ("conv_transpose2d", (7, 1), (2, 7), {"padding": (1, 3), "stride": (3, 2)}),
    ("conv1d", (2,), (7,), {"padding": 3, "stride": 3}),
    ("conv_transpose1d", (2,), (3,), {"padding": 2, "stride": 3}),
]
SOUND_CALLS = [
    ("conv3d", (3, 6, 6), (3, 3, 3), {"padding": 1}),
    ("conv3d", (8, 6, 6), (7, 3, 3), {"padding": (3, 1, 1), "stride": (2, 1, 1)}),
    ("conv3d", (4, 4, 4), (3, 3, 3), {"padding": "same"}),
    ("conv_transpose3d", (2, 3, 3), (2, 2, 2), {"stride": 2}),
    ("conv2d", (4, 4), (3, 3), {"padding": 1, "stride": 2}),
    ("conv1d", (5,), (3,), {"padding": 2, "dilation": 2}),
]
NATIVE = pytest.mark.skipif(
    not has_native_half("bfloat16"), reason="needs a CPU with bfloat16 instructions"
)
Conv = tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]


def convolve(call: Conv, compute: str) -> tuple[list[Tensor], list[Kernel]]:
    """Result and gradients of a convolution in bfloat16, and the kernels that ran.

    `compute` may be `torch`: under torch.autocast.
    """
    casts = torch.autocast("cpu", torch.bfloat16)
    if compute != "torch":
        casts = Precision("amp", "bfloat16", compute=compute).cast()
    op, size, kernel, settings = call
    torch.manual_seed(0)
    x = torch.randn(2, 16, *size, requires_grad=True)
    weight, bias = nn.Parameter(torch.randn(16, 16, *kernel)), nn.Parameter(torch.randn(16))
    kernels = Kernels()
    with kernels, casts:
        y = getattr(nn.functional, op)(x, weight, bias, **settings)
        y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in (x, weight, bias))], kernels.ran


class TestKernelsThatAreWrong:
    """They are emulated, whatever `compute` says."""

    @pytest.mark.parametrize("call", FAULTY_CALLS, ids=str)
    def test_they_are_emulated(self, call: Conv) -> None:
        assert same_bits(convolve(call, "native")[0], convolve(call, "emulated")[0])

    @NATIVE
    @pytest.mark.parametrize("call", SOUND_CALLS, ids=str)
    def test_others_run_natively(self, call: Conv) -> None:
        (auto, ran), (native, _) = convolve(call, "auto"), convolve(call, "torch")
        assert same_bits(auto, native)
        formats = {k.given for k in ran if k.name.startswith("convolution")}
        assert formats == {frozenset({torch.bfloat16})}

    def test_an_input_without_a_batch(self) -> None:
        weight = torch.ones(16, 16, 3, 3, 3, dtype=torch.bfloat16)
        assert is_faulty("conv3d", torch.ones(16, 2, 6, 6), weight, None, 1, (1, 1, 1))
        assert not is_faulty("conv3d", torch.ones(16, 3, 6, 6), weight, None, 1, (1, 1, 1))
        assert is_faulty("conv3d", torch.ones(16, 4, 6, 6), weight, None, 1, 2, 2)
        # As deep as the input: with steps of 2 from -1 it is inside at no position.
        assert is_faulty("conv3d", torch.ones(16, 3, 7, 7), weight, None, 2, 1)
        assert not is_faulty("conv3d", torch.ones(16, 3, 7, 7), weight, stride=2, padding=2)
        assert not is_faulty("conv3d", torch.ones(16, 2, 6, 6), weight.half(), None, 1, 1)
        assert not is_faulty("conv_transpose3d", torch.ones(16, 1, 1, 1), weight, None, 2, 0, 1)

    @NATIVE
    @pytest.mark.slow
    def test_they_are_still_wrong(self) -> None:
        """In a process of its own, because they write beyond the end of their memory."""
        native = """
import torch, test_emulation as t
for call in t.FAULTY_CALLS[:2]:
    ours, theirs = (t.convolve(call, c)[0][2] for c in ('emulated', 'torch'))
    error = (ours - theirs).norm() / ours.norm()
    assert error < 2**-6, float(error)
"""
        here = Path(__file__).parent
        places = os.pathsep.join(map(str, (here, HELPERS, os.environ.get("PYTHONPATH", ""))))
        done = subprocess.run(
            [sys.executable, "-c", native],
            env=os.environ | {"PYTHONPATH": places},
            capture_output=True,
        )
        assert b"No module named" not in done.stderr
        seen_in = tuple(map(int, FAULTY_IN.split(".")))
        now = tuple(map(int, torch.__version__.partition("+")[0].split(".")[:3]))
        assert done.returncode or now <= seen_in, (
            f"torch {torch.__version__} has mended them: emulate only torch <= {FAULTY_IN}"
        )


def test_what_a_compiled_graph_rounds_is_never_its_input() -> None:
    """An op of torch.library must not return what it was given, rounded already or not."""
    given = torch.ones(3, dtype=torch.bfloat16)
    result = torch.ops.mpframe.convert(given, torch.bfloat16)
    assert torch.equal(result, given)
    assert result.data_ptr() != given.data_ptr()
