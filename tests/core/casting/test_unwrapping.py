"""Torch's Python functions that hide many ops behind one name are opened for the casts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vocabulary import HALVES, CalledOps, Kernels

from mpframe import Precision
from mpframe.core.casting.torch_functions import _CALL_THEIR_OP, _copy_with_answer, unwrap

FP32, HALF = torch.float32, torch.float16
ROWS, WEIGHT = torch.arange(3), torch.rand(3, 2)
IMAGES, STATISTICS = torch.rand(2, 3, 4, 4), (torch.zeros(3), torch.ones(3))
CALLS = {
    "batch_norm": lambda f: f(IMAGES, *STATISTICS, *STATISTICS, training=True),
    "embedding": lambda f: f(ROWS, WEIGHT, max_norm=0.5),
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


def ran(call, half="float16"):
    with Kernels() as kernels, Precision("amp", half, compute="native").cast():
        call()
    return {(kernel.name, dtype) for kernel in kernels.computing() for dtype in kernel.given}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("norm_first", "training"), [(True, True), (False, True), (False, False)])
def test_transformer(norm_first, training, half) -> None:
    x, dtype = torch.rand(2, 3, 8), HALVES[half]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    seen = ran(lambda: encoder(x), half)
    assert {("addmm", dtype), ("native_layer_norm", FP32)} <= seen
    assert seen.isdisjoint({("addmm", FP32), ("native_layer_norm", dtype)})
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    with_weights = ran(lambda: attention(x, x, x), half)
    assert {("addmm", dtype), ("bmm", dtype), ("_softmax", FP32)} <= with_weights


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
