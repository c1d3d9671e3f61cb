"""A forward pass that is run again in the backward pass runs under the casts of its first run."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_storage import Reads
from torch import nn
from torch.utils.checkpoint import checkpoint
from vocabulary import in_another_thread, same_bits

from mpframe import OpLists, Precision


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


def test_a_weight_that_is_used_on_both_sides() -> None:
    """Its cast is made once in the forward pass, and once more where it is run again."""
    precision, x, weight = Precision("amp", compute="emulated"), torch.rand(3, 8), torch.rand(8, 8)

    def gradient(run):
        w = weight.clone().requires_grad_()
        with precision.cast():
            product = F.linear(x, w)
            loss = F.linear(run(lambda x: F.linear(x, w).exp(), product), w).sum()
        loss.backward()
        return w.grad

    assert torch.equal(gradient(KINDS["not reentrant"]), gradient(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_that_fails_leaves_no_block_open(kind) -> None:
    fail, x = False, torch.rand(4, 4, requires_grad=True)

    def function(x):
        if fail:
            raise ArithmeticError
        return x @ x

    with Precision("amp").cast():
        loss = KINDS[kind](function, x).sum()
    fail = True
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert (x @ x).dtype == torch.float32
