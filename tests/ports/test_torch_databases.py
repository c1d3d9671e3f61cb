"""torch's databases: what works in fp32 works here in half, and optimizers are what they are there.

Ops: a sample call of `op_db`, with every floating input in half and with half beside fp32, forward
and backward, in every spelling. Modules: each of `module_db` on fp32 and on half inputs.
Optimizers: over the masters each of `optim_db` is, bit for bit, the plain one over the same
gradients in fp32. The lists of torch's tests of autocast: what they promise for CUDA and for the
CPU holds here.
"""

import copy
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, product, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_map
from vocabulary import HALVES, tensors

from mpframe import Precision, Static

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of deprecated and beta parts
each = pytest.mark.parametrize
FP32 = torch.float32


def converted(node: Any, first: torch.dtype, others: torch.dtype) -> Any:
    """New leaves: the first of the fp32 tensors in a format, the others in another."""
    formats = chain([first], repeat(others))

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != FP32:
            return leaf
        return leaf.detach().clone().to(next(formats)).requires_grad_(leaf.requires_grad)

    return tree_map(convert, node)


def error_of(call: Any, given: Any, formats: Any, precision: Precision, backward: bool) -> str:
    try:
        args, kwargs = converted(given, *formats)
        with precision.cast():
            result = call(*args, **kwargs)
        plain = tuple(result) if isinstance(result, tuple) else result  # no pytree: a named tuple
        leaves = [t for t in tensors(plain) if t.requires_grad]
        if backward and leaves:
            torch.stack([t.to_dense().abs().float().sum() for t in leaves]).sum().backward()
    except Exception as error:
        return repr(error)
    return ""


OPS = {
    f"{op.name}.{op.variant_test_name}".rstrip("."): op
    for op in op_db
    if FP32 in op.supported_dtypes("cpu")
}
# Ops that may fail where half and fp32 meet or on half alone: the reason, torch's words, the names.
REASONS = {
    "the name of a kernel, beneath the op that the lists name: run as it is called": (
        "mixed dtype|same dtype|same data type|dtypes match|expected scalar type|not implemented",
        """_batch_norm_with_update _chunk_cat _native_batch_norm_legit _softmax_backward_data
        _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa native_batch_norm
        native_group_norm torch.ops.aten._scaled_dot_product_flash_attention_for_cpu""",
    ),
    "half weights and statistics beside fp32 data: `mixed` stores them in fp32": (
        "mixed dtype",
        "nn.functional.batch_norm nn.functional.instance_norm",
    ),
    "an opt-in kernel of one format, given fp32 data and half weights": (
        "to have the same dtype",
        """nn.functional.linear_cross_entropy.chunked
        nn.functional.linear_cross_entropy.chunked_none""",
    ),
    "random samples of another format than the data": (
        "_random_samples to have the same dtype",
        "nn.functional.fractional_max_pool2d",
    ),
    "a 0-d tensor is a number, and torch refuses one of another format here": (
        "different dtypes|same dtype|expected dtype",
        "heaviside lerp meshgrid.list_of_tensors meshgrid.variadic_tensors put",
    ),
}
EXCEPTIONS = {name: why for why, (_, names) in REASONS.items() for name in names.split()}
COMPUTES = [("float16", "emulated"), ("float16", "native"), ("bfloat16", "native")]


def samples(op: Any, count: int) -> list[Any]:
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", FP32, requires_grad=op.supports_autograd)
    return [((s.input, *s.args), s.kwargs) for s in islice(made, count)]


def mixes(sample: Any, half: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    """The ways in which formats can meet: that of the first tensor, and that of the others."""
    floating = [tensor for tensor in tensors(sample) if tensor.dtype == FP32]
    return [(half, half), (half, FP32), (FP32, half)][: 3 if len(floating) > 1 else 1]


def failures(op: Any, count: int) -> Iterator[str]:
    """The errors of calls that work in fp32: of functions, methods and aliases."""
    spellings = [s for own in (op, *op.aliases) for s in (own.op, own.method_variant) if s]
    for sample, call in product(samples(op, count), spellings):
        in_fp32 = partial(error_of, call, sample, (FP32, FP32), Precision("fp32"))
        backward = not in_fp32(True)
        if not backward and in_fp32(False):
            continue
        for half, compute in COMPUTES:
            precision = Precision("amp", half, compute=compute)
            for formats in mixes(sample, HALVES[half]):
                if error := error_of(call, sample, formats, precision, backward):
                    yield f"{formats} {compute}: {error}"


@each("count", [3, pytest.param(200, marks=pytest.mark.storm)])
@each("name", OPS)
def test_an_op_that_works_in_fp32_works_in_half(name: str, count: int) -> None:
    found = set(failures(OPS[name], count))
    if name in EXCEPTIONS:
        words, _ = REASONS[EXCEPTIONS[name]]
        found = {failure for failure in found if not re.search(words, failure)}
    assert not found


PLACES = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": Tensor}
# Kernels beneath the ops that the lists name, those of a GPU, what torch's own test leaves out, and
# what CPU autocast alone runs in fp32: here, as on CUDA, it follows its input.
LEFT_OUT = "_convolution _addmm_activation _native_multi_head_attention cudnn_convolution "
LEFT_OUT += "cudnn_convolution_transpose einsum avg_pool3d reflection_pad1d"


def listed(table: str, lists: Any) -> Iterator[tuple[str, Any]]:
    """The calls of a table's lists by their names: the function, what it is given, the promise."""
    for name, rows in vars(lists).items():
        place = PLACES["nn" if name == "banned" else name.split("_")[0]]
        for op, *rest in (row for row in rows if row[0] not in LEFT_OUT.split()):
            promise = "half" if name.endswith("16") else FP32
            if "builtin" in name:
                promise = torch.bool if rest[-1] is torch.bool else FP32
            kwargs = rest[1] if len(rest) > 1 and isinstance(rest[1], dict) else {}
            for args in [part for part in rest if isinstance(part, tuple) and part] or [()]:
                yield f"{table}-{op}", (getattr(place, op), args, kwargs, promise)


TABLES = {"CUDA": AutocastTestLists("cpu"), "CPU": AutocastCPUTestLists("cpu")}
LISTED = chain.from_iterable(listed(*table) for table in TABLES.items())
CALLS = {f"{name}-{number}": call for number, (name, call) in enumerate(LISTED)}


@each("name", CALLS)
def test_what_autocasts_lists_promise_holds(name: str) -> None:
    function, args, kwargs, promise = CALLS[name]
    for half, compute in product(HALVES, ("emulated", "native")):

        def convert(leaf: Any, narrow: torch.dtype = HALVES[half]) -> Any:
            return leaf.to(narrow) if getattr(leaf, "dtype", 0) in HALVES.values() else leaf

        with Precision("amp", half, compute=compute).cast():
            result = function(*tree_map(convert, args), **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        wanted = HALVES[half] if promise == "half" else promise
        assert isinstance(first, bool) or first.dtype == wanted


MODULES = {info.name.removeprefix("nn."): info for info in module_db if FP32 in info.dtypes}


def error_of_module(module: nn.Module, given: Any, dtype: torch.dtype, mode: Precision) -> str:
    """Of its training; the classes decide which weights are half. A lazy one is called before."""
    if any(map(nn.parameter.is_lazy, module.parameters())):
        module(*converted(given[0], FP32, FP32))
    if any(True for _ in module.parameters()):
        module, _ = mode.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return error_of(module, given, (dtype, dtype), mode, backward=True)


@each("count", [2, pytest.param(1000, marks=pytest.mark.storm)])
@each("training", [True, False], ids=["train", "eval"])
@each("name", MODULES)
def test_a_module_that_trains_in_fp32_trains_in_every_mode(
    name: str, training: bool, count: int
) -> None:
    info, found = MODULES[name], set()
    torch.manual_seed(0)
    how: Any = {"device": "cpu", "dtype": FP32, "requires_grad": True, "training": training}
    for sample in islice(info.module_inputs_func(info, **how), count):
        made, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).train(training)
        inputs = given.args, given.kwargs
        if error_of_module(copy.deepcopy(module), inputs, FP32, Precision("fp32")):
            continue
        for mode, half in product(("amp", "mixed"), HALVES):
            for dtype in (FP32, HALVES[half]):
                own = copy.deepcopy(module)
                found.add(error_of_module(own, inputs, dtype, Precision(mode, half)))
    # Its opt-in kernel takes one format, and is given fp32 data and half weights.
    assert bool(found - {""}) == (name == "LinearCrossEntropyLoss" and count > 2), found


FORMATS = {"fp32": Precision("fp32"), **{half: Precision("mixed", half) for half in HALVES}}
SCALE = 2.0**10  # a power of two: scaling and unscaling take no bit


def configurations() -> Iterator[Any]:
    """(optimizer, keyword arguments): torch's, in every implementation that runs on a CPU.

    `capturable` is for CUDA graphs; `differentiable` keeps a graph that no master has; LBFGS takes
    a closure.
    """
    for info in (i for i in optim_db if not i.step_requires_closure):
        without = {"differentiable"} | ({"fused"} if "cpu" not in info.supports_fused_on else set())
        ways = [way for way in info.supported_impls if way not in without]
        for given in info.optim_inputs_func(device="cpu"):
            for way in ("", *ways) if not given.kwargs.get("capturable") else ():
                name = f"{info.optim_cls.__name__}-{given.desc}-{way or 'default'}"
                own = {**given.kwargs, **({way: True} if way else {})}
                yield pytest.param(info, own, id=name.replace(" ", "_"))


def gradient_of(parameter: nn.Parameter, generator: torch.Generator, sparse: bool) -> Tensor:
    """In fp32; a sparse one touches every other row."""
    dense, rows = torch.randn(parameter.shape, generator=generator), torch.arange(0, 5, 2)
    if not sparse:
        return dense
    return torch.sparse_coo_tensor(rows[None], dense[rows], dense.shape).coalesce()


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state's values in the order of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [value for p in parameters for _, value in sorted(optimizer.state[p].items())]


@each("kept", FORMATS)
@each(("info", "kwargs"), list(configurations()))
def test_the_wrapper_is_the_optimizer(info: Any, kwargs: Any, kept: str) -> None:
    torch.manual_seed(0)
    # A matrix alone for Muon, which takes no vector.
    model: nn.Module = nn.Linear(3, 5, bias=info.optim_cls is not torch.optim.Muon)
    plain = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    reference = info.optim_cls(plain, **copy.deepcopy(kwargs))
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(kwargs))
    _, wrapped = FORMATS[kept].prepare(model, optimizer)
    stored = list(model.parameters())
    generator = torch.Generator().manual_seed(100)
    for _ in range(4):
        for p, s in zip(plain, stored, strict=True):
            gradient = gradient_of(p, generator, info.only_supports_sparse_grads)
            s.grad = (gradient * SCALE).to(s.dtype)
            p.grad = s.grad.float() / SCALE
        reference.step()
        assert not wrapped.step(Static(SCALE)).skipped
    masters = [wrapped.master_of(s) for s in stored]
    assert all(map(torch.equal, masters, plain))
    assert all(torch.equal(s, m.to(s.dtype)) for s, m in zip(stored, masters, strict=True))
    states = zip(state_of(optimizer), state_of(reference), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in states)
