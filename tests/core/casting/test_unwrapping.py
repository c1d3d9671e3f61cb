"""Which of torch's Python functions are opened for the casts, and which call one op alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vocabulary import CalledOps

from mpframe.core.casting.torch_functions import _CALL_THEIR_OP, _copy_with_answer, unwrap

ROWS, WEIGHT = torch.arange(3), torch.rand(3, 2)
IMAGES, STATISTICS = torch.rand(2, 3, 4, 4), (torch.zeros(3), torch.ones(3))
CALLS: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "batch_norm": (F.batch_norm, lambda f: f(IMAGES, *STATISTICS, *STATISTICS, training=True)),
    "embedding": (F.embedding, lambda f: f(ROWS, WEIGHT, max_norm=0.5)),
    "instance_norm": (F.instance_norm, lambda f: f(IMAGES, *STATISTICS)),
    "max_pool2d_with_indices": (
        F.max_pool2d_with_indices,
        lambda f: f(IMAGES, 2, return_indices=True),
    ),
}
# They ask for a shape, move memory, or write a weight in its own format: no list moves them.
OTHERS = {"size", "dim", "__get__", "contiguous", "detach", "embedding_renorm_"}


def test_all_are_here() -> None:
    assert CALLS.keys() == _CALL_THEIR_OP


@pytest.mark.parametrize("name", CALLS)
def test_they_call_the_op_of_their_own_name_and_no_other(name: str) -> None:
    function, call = CALLS[name]
    assert unwrap(function) is None
    with CalledOps() as seen:
        call(_copy_with_answer(function))
    assert set(seen.names) - OTHERS == {name}, seen.names
