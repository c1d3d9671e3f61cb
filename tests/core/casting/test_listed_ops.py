"""Every op of every shipped list, in every spelling: what its kernels are given and give.

The default lists are also held beside torch's CUDA autocast, which fake tensors show without a GPU.
"""

import logging
import warnings
from contextlib import nullcontext
from itertools import chain, product, repeat

import pytest
import torch
from fixtures import has_torch
from op_table import TABLE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from vocabulary import HALVES, Kernels, formats, tensors

from mpframe import OpLists, Precision

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
