"""torch's tests of its autocast: what its lists promise for CUDA and for the CPU holds here."""

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from ported import cases
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_map
from vocabulary import HALVES

from mpframe import Precision

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated ops

FP32 = torch.float32
MODULES = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": torch.Tensor}
KERNEL = "the name of a kernel, beneath the op that the lists name: run as it is called"
GPU = "has no kernel on a CPU"
FOLLOWS = "CPU autocast alone runs it in fp32; here, as on CUDA, it follows its input"
DIFFERS = {
    "_convolution": KERNEL,
    "_addmm_activation": KERNEL,
    "_native_multi_head_attention": KERNEL,
    "cudnn_convolution": GPU,
    "cudnn_convolution_transpose": GPU,
    "avg_pool3d": FOLLOWS,
    "reflection_pad1d": FOLLOWS,
    "einsum": "torch's own test leaves this case out, as its arguments are not a tuple",
}


class Case(NamedTuple):
    module: str
    op: str
    args: Any
    kwargs: dict[str, Any]
    promise: str  # of the list it stands in: half, fp32, or bool


def calls_of(lists: Any) -> Iterator[Case]:
    """The calls of every list of a table of torch's."""
    for name, rows in vars(lists).items():
        place = "nn" if name == "banned" else name.split("_")[0]
        for op, *rest in rows:
            kwargs = rest[1] if len(rest) > 1 and isinstance(rest[1], dict) else {}
            promise = "half" if name.endswith("16") else "fp32"
            if "builtin" in name:
                promise = "bool" if rest[-1] is torch.bool else "fp32"
            for args in [part for part in rest if isinstance(part, tuple) and part] or [()]:
                yield Case(place, op, args, kwargs, promise)


TABLES = {"CUDA": AutocastTestLists("cpu"), "CPU": AutocastCPUTestLists("cpu")}
CASES = {
    f"{table}-{case.op}-{number}": case
    for table, lists in TABLES.items()
    for number, case in enumerate(calls_of(lists))
}
REASONS = {name: DIFFERS[case.op] for name, case in CASES.items() if case.op in DIFFERS}


def kept(case: Case, half: str, compute: str) -> bool:
    """Whether the promise holds, with half tensors in `half`."""

    def convert(x: Any) -> Any:
        narrow = isinstance(x, torch.Tensor) and x.dtype in HALVES.values()
        return x.to(HALVES[half]) if narrow else x

    function, args = getattr(MODULES[case.module], case.op), tree_map(convert, case.args)
    with Precision("amp", half, compute=compute).cast():
        result = function(*args, **case.kwargs)
    first = result[0] if isinstance(result, (tuple, list)) else result
    if case.promise == "bool" or isinstance(first, bool):
        return isinstance(first, bool) or first.dtype == torch.bool
    return bool(first.dtype == {"half": HALVES[half], "fp32": FP32}[case.promise])


@pytest.mark.parametrize("name", cases(CASES, REASONS))
def test_what_torch_promises_for_cuda_holds_or_differs(name: str) -> None:
    case = CASES[name]
    if name in REASONS:
        with contextlib.suppress(RuntimeError, ValueError):  # no kernel, or no such arguments
            assert not kept(case, "bfloat16", "native")
    else:
        assert all(kept(case, *how) for how in product(HALVES, ("emulated", "native")))


def test_no_difference_without_a_case() -> None:
    assert {case.op for case in CASES.values()} >= DIFFERS.keys()
