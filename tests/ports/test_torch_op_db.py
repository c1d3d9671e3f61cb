"""torch's op database `op_db`: a sample call that works in fp32 works in a cast block on half.

With every floating input in half and with half beside fp32, forward and backward, in every
spelling. In-place forms keep their tensor's format.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map
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
# Ops that may fail where half and fp32 meet or on half alone, by the reason.
REASONS = {
    KERNEL: """_batch_norm_with_update _chunk_cat _native_batch_norm_legit _softmax_backward_data
        _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa native_batch_norm
        native_group_norm torch.ops.aten._scaled_dot_product_flash_attention_for_cpu""",
    STATISTICS: "nn.functional.batch_norm nn.functional.instance_norm",
    CHUNKED: """nn.functional.linear_cross_entropy.chunked
        nn.functional.linear_cross_entropy.chunked_none""",
    "random samples of another format than the data": "nn.functional.fractional_max_pool2d",
    NUMBER: "heaviside lerp meshgrid.list_of_tensors meshgrid.variadic_tensors put",
}
EXCEPTIONS = {name: why for why, names in REASONS.items() for name in names.split()}
COMPUTES = [("float16", "emulated"), ("float16", "native"), ("bfloat16", "native")]
CASES = [
    pytest.param(name, marks=[pytest.mark.differs(EXCEPTIONS[name])] if name in EXCEPTIONS else [])
    for name in OPS
]
Call = Callable[..., Any]
Sample = tuple[Any, Any, Any]


def spellings(op: OpInfo) -> list[Call]:
    """The op as a function and as a method, and its aliases."""
    found = [s for own in (op, *op.aliases) for s in (own.op, own.method_variant)]
    return [spelling for spelling in found if spelling is not None]


def samples(op: OpInfo, count: int) -> Iterator[Sample]:
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", FP32, requires_grad=op.supports_autograd)
    return ((s.input, s.args, s.kwargs) for s in itertools.islice(made, count))


def converted(sample: Sample, how: str, half: torch.dtype) -> Sample:
    """The sample with fp32 tensors in `half`: all, all but the first, or the first alone."""
    seen = itertools.count()

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != FP32:
            return leaf
        first = next(seen) == 0
        narrow = how == "all" or (how == "first") == first
        copy = leaf.detach().clone().to(half if narrow else FP32)
        return copy.requires_grad_(leaf.requires_grad)

    return tree_map(convert, sample)


def mixes(sample: Sample) -> tuple[str, ...]:
    """The ways in which formats can meet in this sample."""
    floating = [t for t in tree_leaves(sample) if isinstance(t, Tensor) and t.dtype == FP32]
    return ("all", "first", "others") if len(floating) > 1 else ("all",)


def run(call: Call, sample: Sample, precision: Precision, backward: bool) -> None:
    tensor, args, kwargs = sample
    with precision.cast():
        result = call(tensor, *args, **kwargs)
    leaves = (t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad)
    totals = [t.to_dense().abs().float().sum() for t in leaves if backward]
    if totals:
        torch.stack(totals).sum().backward()


def works_in_fp32(call: Call, sample: Sample, backward: bool) -> bool:
    try:
        run(call, converted(sample, "none", FP32), Precision("fp32"), backward)
    except Exception:
        return False
    return True


def failures(op: OpInfo, count: int) -> Iterator[str]:
    """The errors of calls that work in fp32."""
    for sample, call in itertools.product(samples(op, count), spellings(op)):
        backward = works_in_fp32(call, sample, True)
        if not backward and not works_in_fp32(call, sample, False):
            continue
        for (half, compute), how in itertools.product(COMPUTES, mixes(sample)):
            precision = Precision("amp", half, compute=compute)
            try:
                run(call, converted(sample, how, HALVES[half]), precision, backward)
            except Exception as error:
                yield f"{how} {half} {compute}: {error}".splitlines()[0]


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.storm)])
@pytest.mark.parametrize("name", CASES)
def test_what_works_in_fp32_works_in_half(name: str, count: int) -> None:
    assert not set(failures(OPS[name], count)) or name in EXCEPTIONS


def test_exceptions_are_ops_that_fail() -> None:
    assert {name for name in EXCEPTIONS if not any(failures(OPS[name], 200))} == set()


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.inplace_variant])
def test_in_place_forms_take_a_source_of_another_format(name: str) -> None:
    call = OPS[name].inplace_variant
    for sample, half in itertools.product(samples(OPS[name], 20), HALVES.values()):
        plain, args, kwargs = converted(sample, "none", FP32)
        try:
            with torch.no_grad():
                call(plain, *args, **kwargs)
        except RuntimeError:
            continue
        for how, kept in (("first", half), ("others", FP32)) if "first" in mixes(sample) else ():
            with torch.no_grad(), Precision("amp", str(half)[6:]).cast():
                tensor, args, kwargs = converted(sample, how, half)
                result = call(tensor, *args, **kwargs)
            assert result is tensor
            assert result.dtype == kept
