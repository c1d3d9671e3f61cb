"""Every op of every shipped list, in every spelling: what its kernels are given and give.

The default lists are also held beside torch's CUDA autocast, which fake tensors show without a GPU.
And emulated half against its definition, bit for bit: y = half(op(fp32(x), ...)) and
dx = half(d op(fp32(x), ...) . fp32(dy)), in plain fp32 torch with explicit roundings.
"""

import logging
import warnings
from contextlib import nullcontext
from itertools import chain, product, repeat

import pytest
import torch
from fixtures import has_torch
from op_table import TABLE
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from vocabulary import HALVES, Kernels, formats, inside, same_bits, tensors

from mpframe import OpLists, Precision
from mpframe.precision.emulation import half_values, is_faulty, round_to

FP32 = torch.float32
LISTS = {name: OpLists.named(name) for name in ("default", "fast", "fp32_norms", "none")}
HOW = ("fp32", "half", "both")

# torch's CPU has no half kernel for these: computed in fp32, rounded once.
NO_HALF_KERNEL = {"avg_pool3d", "rrelu"}
# Formats that kernels use besides: some widen and round by themselves, others make their tolerances
# and positions in float64.
FP64_INSIDE = {"linalg_matrix_rank", "pinverse"}
if has_torch("2.15"):
    FP64_INSIDE |= {"nanquantile", "quantile"}
INSIDE = {"rms_norm": {FP32}} | {op: {torch.float64} for op in FP64_INSIDE}
# These give integers or booleans.
NO_FLOATS = {"allclose", "isclose", "linalg_matrix_rank", "torchvision.nms"}


def inputs_as(row, how, half):
    """The row's inputs: all `fp32`, all `half`, or `both`: the first fp32 and the others half."""
    formats = chain([half if how == "half" else FP32], repeat(FP32 if how == "fp32" else half))

    def convert(leaf):
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.clone().to(next(formats)) if floating else leaf

    return tree_map(convert, row.inputs)


def lists_of(op):
    """The shipped lists that say something about `op`, each different answer once."""
    answers = {lists.list_of(op): lists for lists in reversed(LISTS.values())}
    return (lists for answer, lists in answers.items() if answer != "none")


def run(spelling, inputs, precision):
    with warnings.catch_warnings(), Kernels() as kernels, precision.cast():
        warnings.simplefilter("ignore")  # torch's own, of deprecated ops
        return kernels, spelling(*inputs)


def expected(op, policy, how):
    """The formats the kernels of `op` are to be given, and those of its result."""
    held_by, given, gave = policy.ops.list_of(op), FP32, FP32
    if held_by == "allow" or (held_by == "infer" and how == "half"):
        emulated = policy.compute == "emulated" and held_by == "allow"
        gave = policy.half_dtype
        given = FP32 if emulated or op in NO_HALF_KERNEL else gave
    return {given} | INSIDE.get(op, set()), set() if op in NO_FLOATS else {gave}


@pytest.mark.parametrize(
    ("mode", "half", "compute"),
    [
        ("amp", "float16", "emulated"),
        ("mixed", "bfloat16", "native"),
        pytest.param("amp", "bfloat16", "emulated", marks=pytest.mark.slow),
        pytest.param("mixed", "float16", "native", marks=pytest.mark.slow),
    ],
)
def test_formats(mode, half, compute) -> None:
    listed, wrong = (own.allow | own.deny | own.infer for own in LISTS.values()), []
    assert set().union(*listed) == TABLE.keys()
    for op, row in TABLE.items():
        for lists, how in product(lists_of(op), HOW):
            inputs = inputs_as(row, how, HALVES[half])
            precision = Precision(mode, half, ops=lists, compute=compute)
            wanted = expected(op, precision.policy, how if len(formats(inputs)) < 2 else "both")
            for number, spelling in enumerate(row.spellings):
                kernels, result = run(spelling, inputs, precision)
                if (kernels.given(), formats(result)) != wanted:
                    wrong.append((op, number, how, kernels.given(), formats(result), wanted))
    assert wrong == []


ALLOWED = set().union(*(lists.allow for lists in LISTS.values()))


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "half", "scale"),
    [  # In float16 there are subnormal results, and those beyond the range.
        *(("mixed", "bfloat16", 1.0), ("amp", "bfloat16", 1.0)),
        *(("amp", "float16", 2.0**-12), ("amp", "float16", 2.0**9)),
    ],
)
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


def test_rounding_helpers_and_the_op_in_a_compiled_graph_whose_result_is_never_its_input() -> None:
    x, half = torch.tensor([1 + 2.0**-12, 1e-3, -70000.0, float("nan")]), torch.float16
    assert same_bits([half_values(x, half), round_to(x, half)], [x.half().float(), x.half()])
    assert round_to(torch.arange(3), half).dtype == torch.int64
    result = torch.ops.mpframe.convert(x, torch.float32)
    assert same_bits([result], [x])
    assert result.data_ptr() != x.data_ptr()


class TestAWeightUsedAgain:
    """The gradients of its uses add in half, one after another, as they do on a device."""

    @pytest.mark.parametrize(("half", "uses"), [("bfloat16", 2), ("float16", 40)])
    def test_each_gradient_is_rounded_before_it_is_added(self, half, uses) -> None:
        weight, inputs = nn.Parameter(torch.randn(3, 5)), torch.randn(uses, 4, 5)
        with emulated(half):
            products = [nn.functional.linear(x, weight) for x in inputs]
            torch.stack(products).float().sum().backward()
        total = torch.zeros(3, 5, dtype=HALVES[half])
        for x in reversed(inputs.to(HALVES[half])):  # The engine runs the last use first.
            total = total + (torch.ones(3, 4) @ x.float()).to(HALVES[half])
        assert same_bits([weight.grad], [total.float()])

    def test_all_uses_share_its_memory(self) -> None:
        weight, x, seen = nn.Parameter(torch.ones(3, 3)), torch.ones(1, 3, requires_grad=True), []
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda t: seen.append(t) or t, lambda t: t), emulated():
            for _ in range(5):
                x = nn.functional.linear(x, weight)
        assert len({t.data_ptr() for t in seen if t.shape == (3, 3)}) == 1

    @pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in forward mode
    def test_transforms_of_functions_see_every_use(self) -> None:
        """Values and derivatives that float16 holds exactly: f(w) = (w w x)^T 1 + (w x)^T 1."""
        x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])

        def total(weight):
            once = nn.functional.linear(x, weight)
            return (nn.functional.linear(once, weight) + once).float().sum()

        cast = inside(Precision("amp", compute="emulated"), total)
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
            assert torch.equal(transform(cast)(weight), transform(total)(weight))
        many, vmap = torch.stack([weight, -weight]), torch.func.vmap
        assert torch.equal(*(vmap(torch.func.grad(f))(many) for f in (cast, total)))


# Faulty are those whose kernel along some axis lies wholly inside at no position.
CALLS = [  # by op, shapes and settings
    ("conv3d", (5, 4, 4), (5, 2, 2), {"padding": (1, 0, 0), "stride": (2, 1, 1)}, True),
    ("conv3d", (4, 6, 6), (3, 3, 3), {"padding": (2, 1, 1), "dilation": (2, 1, 1)}, True),
    ("conv_transpose3d", (2, 5, 5), (7, 2, 5), {"padding": (3, 1, 2), "stride": (2, 2, 1)}, True),
    ("conv_transpose2d", (7, 1), (2, 7), {"padding": (1, 3), "stride": (3, 2)}, True),
    ("conv1d", (2,), (7,), {"padding": 3, "stride": 3}, True),
    ("conv3d", (8, 6, 6), (7, 3, 3), {"padding": (3, 1, 1), "stride": (2, 1, 1)}, False),
    ("conv3d", (4, 4, 4), (3, 3, 3), {"padding": "same"}, False),
    ("conv_transpose3d", (2, 3, 3), (2, 2, 2), {"stride": 2}, False),
    ("conv1d", (5,), (3,), {"padding": 2, "dilation": 2}, False),
]


@pytest.mark.parametrize(("op", "size", "kernel", "settings", "faulty"), CALLS, ids=str)
def test_kernels_that_are_wrong_are_emulated_and_others_run(
    op, size, kernel, settings, faulty
) -> None:
    bfloat16, found = torch.bfloat16, []
    torch.manual_seed(0)
    inputs, weights = torch.randn(2, 16, *size), torch.randn(16, 16, *kernel)
    native, other = (Precision("amp", "bfloat16", compute=c) for c in ("native", "emulated"))
    for casts in (native.cast(), other.cast() if faulty else torch.autocast("cpu", bfloat16)):
        x, weight, bias = (t.clone().requires_grad_() for t in (inputs, weights, torch.ones(16)))
        with Kernels() as kernels, casts:
            y = getattr(nn.functional, op)(x, weight, bias, **settings)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        found.append([y.detach(), x.grad, weight.grad, bias.grad])
        given = {kernel.given for kernel in kernels.ran if kernel.name.startswith("convolution")}
        assert (frozenset({bfloat16}) in given) is not faulty
    assert same_bits(*found)


def test_a_kernel_is_judged_wrong_also_without_a_batch() -> None:
    weight = torch.ones(16, 16, 3, 3, 3, dtype=torch.bfloat16)
    assert is_faulty("conv3d", torch.ones(16, 2, 6, 6), weight, None, 1, (1, 1, 1))
    assert not is_faulty("conv3d", torch.ones(16, 3, 6, 6), weight, None, 1, (1, 1, 1))
    # As deep as the input: with steps of 2 from -1 it is inside at no position.
    assert is_faulty("conv3d", torch.ones(16, 3, 7, 7), weight, None, 2, 1)
    assert not is_faulty("conv3d", torch.ones(16, 3, 7, 7), weight, stride=2, padding=2)
    assert is_faulty("conv3d", torch.ones(16, 2, 6, 6), weight, None, [1, 1, 1], padding=[1])
    assert not is_faulty("conv_transpose3d", torch.ones(16, 1, 1, 1), weight, None, 2, 0, 1)


# Fake tensors have no format to compare here: integer results, or no fake kernel. The norms of
# vectors are as in CUDA autocast.
SAME = {"linalg_lstsq", "linalg_matrix_sqrth", "torchvision.nms"}
SAME |= {"linalg_norm", "linalg_vector_norm"}
# No half kernel on a CPU: fp32, on every device. So are coordinates, which it computes in half.
# Given two formats autocast fails, and here the widest counts. It leaves `_grouped_mm` in the
# format of its inputs, and refuses `binary_cross_entropy`, which is unsafe in half.
DIFFERENT = """
    cholesky_inverse cholesky_solve complex histogramdd logdet lu lu_solve nanquantile ormqr
    pinverse polar quantile stft svd triangular_solve view_as_complex
    cartesian_prod isclose lerp masked_scatter meshgrid scatter scatter_reduce _grouped_mm
    binary_cross_entropy
"""
FAMILIES = ("fft_", "linalg_", "special_", "grid_sampler", "torchvision.")
NOT_FAKEABLE = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def fake(leaf):
    return torch.empty_like(leaf, device="cuda") if isinstance(leaf, Tensor) else leaf


def outcome(spelling, inputs, block):
    with FAKE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = tree_map(fake, inputs)
        try:
            with block:
                return formats(spelling(*inputs))
        except (RuntimeError, NotImplementedError) as error:
            return type(error).__name__


@pytest.mark.slow
def test_the_default_lists_are_those_of_cuda_autocast(caplog) -> None:
    """Without a GPU `torch.autocast("cuda")` would switch itself off."""
    caplog.set_level(logging.CRITICAL, "torch._subclasses.fake_tensor")  # Errors take time.
    default, different = LISTS["default"], set()
    for op, how in product((default.allow | default.deny | default.infer) - NOT_FAKEABLE, HOW):
        if how == "both" and sum(t.is_floating_point() for t in tensors(TABLE[op].inputs)) < 2:
            continue  # As fp32.
        call, inputs = TABLE[op].spellings[-1], inputs_as(TABLE[op], how, torch.float16)
        ours = outcome(call, inputs, Precision("amp").cast())
        torch.set_autocast_enabled("cuda", True)
        try:
            theirs = outcome(call, inputs, nullcontext())
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        different |= {op} if ours != theirs else set()
    of_families = {op for op in default.deny if op.startswith(FAMILIES)}
    assert different == of_families - SAME | {*DIFFERENT.split()}
