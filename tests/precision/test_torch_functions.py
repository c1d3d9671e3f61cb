"""Functions of torch that a precision replaces or opens.

A forward pass that is run again in the backward pass runs under the casts of its first run. What is
replaced for it, only where a block casts, is taken back. And Python functions that hide many ops
behind one name are opened for the casts.
"""

import copy
import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_storage import Reads
from torch import nn
from torch.utils.checkpoint import checkpoint
from vocabulary import CalledOps, Kernels, in_another_thread, inside, same_bits

from mpframe import OpLists, Precision
from mpframe.precision import torch_functions
from mpframe.precision.torch_functions import _CALL_THEIR_OP, _copy_with_answer, unwrap

FP32, HALF, A = torch.float32, torch.float16, torch.rand(4, 4)


def plain(function, *inputs):
    return function(*inputs)


own_context = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
KINDS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "own context": partial(checkpoint, **own_context),
}
# A product before a norm, a recurrent layer, and a head, all of which may be pinned.
NET = Reads(
    lambda m, x, run: run(m.head, run(lambda x: m.cell(m.body(x))[0], x)),
    body=nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)),
    cell=nn.GRU(8, 8),
    head=nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)),
)
# What is run again is a function of a module that may be pinned.
INNER = Reads(lambda m, x, run: run(lambda x: F.linear(x, m.weight), x), weight=(8, 8))
OUTER = Reads(lambda m, x, run: m.inner(x, run), inner=INNER)


def gradients(precision, model, run, elsewhere=False, around=None):
    """elsewhere: in another thread, as CUDA's autograd engine, which has no casts of its own."""
    model = copy.deepcopy(model)
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with precision.cast():
        loss = model(x, run).float().square().sum()
    with around() if around else nullcontext():
        in_another_thread(loss.backward) if elsewhere else loss.backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "half", "compute", "modules"),
    [
        ("amp", "float16", "emulated", {"head": "fp32", "body": "half"}),
        ("mixed", "bfloat16", "emulated", {}),
        ("amp", "bfloat16", "native", {"head": "fp32"}),
    ],
)
def test_checkpoint(mode, half, compute, modules, kind) -> None:
    """The block of the forward pass decides, and not one around the backward pass."""
    ops = replace(OpLists.named(), modules=modules)
    precision, run = Precision(mode, half, ops=ops, compute=compute), KINDS[kind]
    expected = gradients(precision, NET, plain)
    blocks = [Precision("fp32"), Precision("amp"), Precision("amp", "bfloat16", compute="native")]
    for around in (None, precision.cast, *(own.cast for own in blocks)):
        for elsewhere in (False, True):
            assert same_bits(gradients(precision, NET, run, elsewhere, around), expected)
    again = lambda block, x: run(lambda x: run(block, x), x)  # noqa: E731
    assert same_bits(gradients(precision, NET, again), expected)


@pytest.mark.parametrize(("elsewhere", "inside"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_pinned_module(kind, elsewhere, inside) -> None:
    precision = Precision("amp", ops=replace(OpLists.named(), modules={"inner": "fp32"}))
    expected, around = gradients(precision, OUTER, plain), precision.cast if inside else None
    assert same_bits(gradients(precision, OUTER, KINDS[kind], elsewhere, around), expected)
    assert not same_bits(gradients(Precision("amp"), OUTER, plain), expected)


def functions():
    names = [(owner, name) for owner, name, _ in torch_functions._REPLACED]
    return {(owner, name): getattr(owner, name) for owner, name in names}


@pytest.fixture
def before():
    for user in tuple(torch_functions._users):  # Those of other tests, which still live.
        torch_functions.stop_following(user)
    return functions()


class Double(torch.autograd.Function):
    forward = backward = staticmethod(lambda ctx, x: x * 2)


def test_only_a_block_that_casts_replaces_something_and_it_is_what_the_page_names(before) -> None:
    for mode in ("fp32", "amp", "mixed"):
        model, precision = torch.nn.Linear(4, 4), Precision(mode)
        precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with (precision if mode == "fp32" else Precision("fp32")).cast():
            assert functions() == before
    with Precision("amp").cast():
        now = functions()
    changed = {name for (_, name), function in now.items() if before[_, name] is not function}
    others = {"_engine_run_backward", "update_parameters"}
    assert changed == {"__init__", "apply", "__call__"} | others


def test_release_takes_it_back(before) -> None:
    first, second = Precision("amp"), Precision("mixed")
    for precision in (first, second, first):
        inside(precision, torch.exp)(A)
    first.release()
    assert functions() != before  # The second needs it.
    for precision in (second, second, Precision("fp32")):
        precision.release()
    assert functions() == before


def test_the_end_of_a_precision_takes_it_back_and_a_graph_outlives_it(before) -> None:
    """The graph keeps the casts that its backward pass needs."""
    precision, x = Precision("amp"), A.clone().requires_grad_()
    y = inside(precision, Double.apply)(x)
    del precision
    gc.collect()
    assert functions() != before
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))
    del y
    gc.collect()
    assert functions() == before


WORDS, WEIGHT = torch.arange(3), torch.rand(3, 2)
IMAGES, STATISTICS = torch.rand(2, 3, 4, 4), (torch.zeros(3), torch.ones(3))
CALLS = {
    "batch_norm": lambda f: f(IMAGES, *STATISTICS, *STATISTICS, training=True),
    "embedding": lambda f: f(WORDS, WEIGHT, max_norm=0.5),
    "instance_norm": lambda f: f(IMAGES, *STATISTICS),
    "max_pool2d_with_indices": lambda f: f(IMAGES, 2, return_indices=True),
}
# They ask for a shape, move memory, or write a weight in its own format: no list moves them.
OTHERS = {"size", "dim", "__get__", "contiguous", "detach", "embedding_renorm_"}


def test_those_that_stay_shut_call_the_op_of_their_own_name_and_no_other() -> None:
    assert CALLS.keys() == _CALL_THEIR_OP
    for name, call in CALLS.items():
        function = getattr(F, name)
        assert unwrap(function) is None
        with CalledOps() as seen:
            call(_copy_with_answer(function))
        assert set(seen.names) - OTHERS == {name}


def ran(call):
    with Kernels() as kernels, Precision("amp", compute="native").cast():
        call()
    return {(kernel.name, dtype) for kernel in kernels.computing() for dtype in kernel.given}


def test_what_is_hidden_in_a_function() -> None:
    for call, kernel in (
        (lambda x: 1 / x, "reciprocal"),
        (lambda x: 2**x, "pow"),
        (lambda x: x.__rpow__(2), "pow"),
        (F.gumbel_softmax, "_softmax"),
        (F.normalize, "linalg_vector_norm"),
        (torch.norm, "linalg_vector_norm"),
        (lambda x: F.local_response_norm(x[None, None], 2), "pow"),
        (lambda x: F.gaussian_nll_loss(x, x, x.abs() + 1), "log"),
    ):
        seen = ran(partial(call, torch.rand(4, 4).half()))
        assert {dtype for name, dtype in seen if name == kernel} == {FP32}
