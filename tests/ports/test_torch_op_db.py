"""torch's op database `op_db`: a sample call that works in fp32 works in a cast block on half.

With every floating input in half and with half beside fp32, forward and backward, in every
spelling. In-place forms keep their tensor's format.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any

import pytest
import torch
from ported import backward_of, cases, converted
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves
from vocabulary import HALVES

from mpframe import Precision

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated and beta ops

FP32 = torch.float32
OPS = {
    f"{op.name}.{op.variant_test_name}".rstrip("."): op
    for op in op_db
    if FP32 in op.supported_dtypes("cpu")
}
KERNEL = "the name of a kernel, beneath the op that the lists name: run as it is called"
STATISTICS = "half weights and statistics beside fp32 data: `mixed` stores them in fp32"
NUMBER = "a 0-d tensor is a number, and torch refuses one of another format here"
CHUNKED = "an opt-in kernel of one format, given fp32 data and half weights"
# Ops that may fail where half and fp32 meet or on half alone: the reason, torch's words, the names.
REASONS = {
    KERNEL: (
        "mixed dtype|same dtype|same data type|dtypes match|expected scalar type|not implemented",
        """_batch_norm_with_update _chunk_cat _native_batch_norm_legit _softmax_backward_data
        _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa native_batch_norm
        native_group_norm torch.ops.aten._scaled_dot_product_flash_attention_for_cpu""",
    ),
    STATISTICS: ("mixed dtype", "nn.functional.batch_norm nn.functional.instance_norm"),
    CHUNKED: (
        "to have the same dtype",
        """nn.functional.linear_cross_entropy.chunked
        nn.functional.linear_cross_entropy.chunked_none""",
    ),
    "random samples of another format than the data": (
        "_random_samples to have the same dtype",
        "nn.functional.fractional_max_pool2d",
    ),
    NUMBER: (
        "different dtypes|same dtype|expected dtype",
        "heaviside lerp meshgrid.list_of_tensors meshgrid.variadic_tensors put",
    ),
}
EXCEPTIONS = {name: why for why, (_, names) in REASONS.items() for name in names.split()}
COMPUTES = [("float16", "emulated"), ("float16", "native"), ("bfloat16", "native")]
Call = Callable[..., Any]
Sample = tuple[Any, Any, Any]


def samples(op: OpInfo, count: int) -> Iterator[Sample]:
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", FP32, requires_grad=op.supports_autograd)
    return ((s.input, s.args, s.kwargs) for s in islice(made, count))


def mixes(sample: Sample, half: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    """The ways in which formats can meet: that of the first tensor, and that of the others."""
    floating = [t for t in tree_leaves(sample) if isinstance(t, Tensor) and t.dtype == FP32]
    return [(half, half), (half, FP32), (FP32, half)][: 3 if len(floating) > 1 else 1]


def error_of(call: Call, sample: Sample, formats: Any, precision: Precision, back: bool) -> str:
    tensor, args, kwargs = converted(sample, *formats)
    try:
        with precision.cast():
            result = call(tensor, *args, **kwargs)
        if back:
            backward_of(result)
    except Exception as error:
        return repr(error)
    return ""


def failures(op: OpInfo, count: int) -> Iterator[str]:
    """The errors of calls that work in fp32: of functions, methods and aliases."""
    spellings = [s for own in (op, *op.aliases) for s in (own.op, own.method_variant)]
    for sample, call in product(samples(op, count), filter(None, spellings)):
        in_fp32 = partial(error_of, call, sample, (FP32, FP32), Precision("fp32"))
        backward = not in_fp32(True)
        if not backward and in_fp32(False):
            continue
        for half, compute in COMPUTES:
            precision = Precision("amp", half, compute=compute)
            for formats in mixes(sample, HALVES[half]):
                if error := error_of(call, sample, formats, precision, backward):
                    yield f"{formats} {compute}: {error}"


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.storm)])
@pytest.mark.parametrize("name", cases(OPS, EXCEPTIONS))
def test_what_works_in_fp32_works_in_half(name: str, count: int) -> None:
    found = set(failures(OPS[name], count))
    if name in EXCEPTIONS:
        words, _ = REASONS[EXCEPTIONS[name]]
        found = {failure for failure in found if not re.search(words, failure)}
    assert not found


def test_exceptions_are_ops_that_fail() -> None:
    assert {name for name in EXCEPTIONS if not any(failures(OPS[name], 200))} == set()


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.inplace_variant])
def test_in_place_forms_take_a_source_of_another_format(name: str) -> None:
    call = OPS[name].inplace_variant
    for sample, half in product(samples(OPS[name], 20), HALVES.values()):
        plain, args, kwargs = converted(sample, FP32, FP32)
        try:
            with torch.no_grad():
                call(plain, *args, **kwargs)
        except RuntimeError:
            continue
        for kept, other in mixes(sample, half)[1:]:
            with torch.no_grad(), Precision("amp", str(half)[6:]).cast():
                tensor, args, kwargs = converted(sample, kept, other)
                result = call(tensor, *args, **kwargs)
            assert result is tensor
            assert result.dtype == kept
