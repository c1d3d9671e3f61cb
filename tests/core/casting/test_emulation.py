"""Emulated half against its definition, bit for bit, forward and backward.

y = half(op(fp32(x), ...)), dx = half(d op(fp32(x), ...) . fp32(dy)): plain fp32 torch with explicit
roundings, which shares nothing with the package.
"""

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import HELPERS
from op_table import TABLE
from test_listed_ops import LISTS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from vocabulary import HALVES, Kernels, same_bits, tensors

from mpframe import Precision
from mpframe.core.casting.emulation import half_values, is_faulty, round_to
from mpframe.core.casting.policy import has_native_half

ALLOWED = set().union(*(lists.allow for lists in LISTS.values()))
FAULTY_IN = "2.15.0"  # The newest torch whose kernels for `FAULTY` were seen to be wrong.


def emulated(half="float16"):
    return Precision("amp", half, compute="emulated").cast()


def scaled(inputs, factor, dtype):
    def convert(leaf):
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return (leaf * factor).to(dtype).requires_grad_() if floating else leaf

    return tree_map(convert, inputs)


def differentiable(node):
    return [t for t in tensors(node) if t.requires_grad]


def found(spelling, inputs, half, block):
    """Results, and gradients for incoming ones that are exact in half."""
    with block:
        results = differentiable(spelling(*inputs))
    generator = torch.Generator().manual_seed(3)
    incoming = [torch.randn(r.shape, generator=generator).to(half).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, differentiable(inputs), incoming, allow_unused=True)
    return results, [g for g in gradients if g is not None]


# The small scale makes subnormal results, the large one results beyond the range of float16.
RUNS = [("mixed", "bfloat16", 1.0), ("amp", "bfloat16", 1.0)]
RUNS += [("amp", "float16", scale) for scale in (2.0**-12, 2.0**9)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "half", "scale"), RUNS)
def test_every_half_op_is_what_the_definition_says(mode, half, scale) -> None:
    dtype, wrong = HALVES[half], []
    for op in sorted(ALLOWED):
        lists = next(lists for lists in LISTS.values() if op in lists.allow)
        precision = Precision(mode, half, ops=lists, compute="emulated")
        exact = scaled(TABLE[op].inputs, scale, dtype)
        as_fp32 = scaled(exact, 1.0, torch.float32)
        given = exact if mode == "mixed" else scaled(TABLE[op].inputs, scale, torch.float32)
        for spelling in TABLE[op].spellings:
            results, gradients = found(spelling, given, dtype, precision.cast())
            wide, wide_gradients = found(spelling, as_fp32, dtype, nullcontext())
            # fp32 weights get the rounded gradient, widened.
            widened = [g.to(dtype).to(differentiable(given)[0].dtype) for g in wide_gradients]
            if not same_bits([*results, *gradients], [*(r.to(dtype) for r in wide), *widened]):
                wrong.append(op)
    assert wrong == []


def test_one_rounding_after_sums_in_fp32() -> None:
    """float16 ends at 65504, and 65520 is the first number that rounds to inf; its least is 2^-24,
    half of which rounds to even, to 0. A running sum of ones in float16 would stop at 2048."""
    ones = torch.ones(1, 4096)
    with emulated():
        ends = [torch.full((1, 1), end) @ ones[:, :1] for end in (65519.0, 65520.0)]
        small = [torch.full((1, 1), 2.0**-12) @ torch.full((1, 1), 2.0**-n) for n in (12, 13)]
        sums = [ones @ ones.T, torch.full((1, 2), 40000.0) @ torch.ones(2, 1)]
    assert [p.item() for p in ends + small] == [65504, math.inf, 2.0**-24, 0]
    assert [s.item() for s in sums] == [4096, math.inf]


def test_rounding_helpers() -> None:
    x, half = torch.tensor([1 + 2.0**-12, 1e-3, -70000.0, float("nan")]), torch.float16
    assert same_bits([half_values(x, half), round_to(x, half)], [x.half().float(), x.half()])
    assert round_to(torch.arange(3), half).dtype == torch.int64


class TestAWeightUsedAgain:
    """The gradients of its uses add in half, one after another, as they do on a device."""

    @pytest.mark.parametrize("mode", ["amp", "mixed"])
    def test_its_gradients_add_as_native_ones_do(self, mode) -> None:
        """300 ones: in bfloat16 the running sum stops at 256, for 256 + 1 rounds to 256."""
        for compute in ("emulated", "native"):
            precision = Precision(mode, "bfloat16", compute=compute)
            layer = nn.Linear(1, 1, bias=False)
            precision.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
            with precision.cast():
                torch.stack([layer(torch.ones(1, 1)) for _ in range(300)]).float().sum().backward()
            assert layer.weight.grad == 256

    @pytest.mark.parametrize(("half", "uses"), [("bfloat16", 2), ("float16", 40)])
    def test_each_gradient_is_rounded_before_it_is_added(self, half, uses) -> None:
        torch.manual_seed(0)
        weight, inputs = nn.Parameter(torch.randn(3, 5)), torch.randn(uses, 4, 5)
        with emulated(half):
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
        hooks = torch.autograd.graph.saved_tensors_hooks
        x = torch.ones(1, 3, requires_grad=True)
        with hooks(lambda t: seen.append(t) or t, lambda t: t), emulated():
            for _ in range(5):
                x = nn.functional.linear(x, weight)
        assert len({t.data_ptr() for t in seen if t.shape == (3, 3)}) == 1

    @pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in forward mode
    def test_transforms_of_functions_see_every_use(self) -> None:
        """Values and derivatives that float16 holds exactly: f(w) = (w w x)^T 1 + (w x)^T 1."""
        x = torch.tensor([[1.0, 2.0]])

        def total(weight):
            with emulated():
                once = nn.functional.linear(x, weight)
                return (nn.functional.linear(once, weight) + once).float().sum()

        def exactly(weight):
            return (x @ weight.T @ weight.T + x @ weight.T).sum()

        weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
            assert torch.equal(transform(total)(weight), transform(exactly)(weight))
        many, vmap = torch.stack([weight, -weight]), torch.func.vmap
        assert torch.equal(*(vmap(torch.func.grad(f))(many) for f in (total, exactly)))


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


def convolve(call, compute):
    """Result, gradients and kernels of a convolution in bfloat16; `torch` is torch.autocast."""
    casts = torch.autocast("cpu", torch.bfloat16)
    if compute != "torch":
        casts = Precision("amp", "bfloat16", compute=compute).cast()
    op, size, kernel, settings = call
    torch.manual_seed(0)
    x = torch.randn(2, 16, *size, requires_grad=True)
    weight, bias = nn.Parameter(torch.randn(16, 16, *kernel)), nn.Parameter(torch.randn(16))
    with Kernels() as kernels, casts:
        y = getattr(nn.functional, op)(x, weight, bias, **settings)
        y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in (x, weight, bias))], kernels.ran


class TestKernelsThatAreWrong:
    """They are emulated, whatever `compute` says."""

    @pytest.mark.parametrize("call", FAULTY_CALLS, ids=str)
    def test_they_are_emulated(self, call) -> None:
        assert same_bits(convolve(call, "native")[0], convolve(call, "emulated")[0])

    @NATIVE
    @pytest.mark.parametrize("call", SOUND_CALLS, ids=str)
    def test_others_run_natively(self, call) -> None:
        (auto, ran), (native, _) = convolve(call, "auto"), convolve(call, "torch")
        assert same_bits(auto, native)
        formats = {k.given for k in ran if k.name.startswith("convolution")}
        assert formats == {frozenset({torch.bfloat16})}

    def test_an_input_without_a_batch(self) -> None:
        weight = torch.ones(16, 16, 3, 3, 3, dtype=torch.bfloat16)
        assert is_faulty("conv3d", torch.ones(16, 2, 6, 6), weight, None, 1, (1, 1, 1))
        assert not is_faulty("conv3d", torch.ones(16, 3, 6, 6), weight, None, 1, (1, 1, 1))
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
        places = [str(Path(__file__).parent), HELPERS, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
        done = subprocess.run([sys.executable, "-c", native], env=environment, capture_output=True)
        assert b"No module named" not in done.stderr
        version = torch.__version__.partition("+")[0].split(".")[:3]
        assert done.returncode or [*map(int, version)] <= [*map(int, FAULTY_IN.split("."))], (
            f"torch {torch.__version__} has mended them: emulate only torch <= {FAULTY_IN}"
        )


def test_what_a_compiled_graph_rounds_is_never_its_input() -> None:
    """An op of torch.library must not return what it was given, rounded already or not."""
    given = torch.ones(3, dtype=torch.bfloat16)
    result = torch.ops.mpframe.convert(given, torch.bfloat16)
    assert torch.equal(result, given)
    assert result.data_ptr() != given.data_ptr()
