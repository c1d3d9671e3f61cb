"""A prepared model is pickled and copied with its hooks, and goes on following the casts."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision


class Net(nn.Module):
    """A recurrent layer, which fits its inputs, and two layers that may be pinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.cell, self.head = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        cell, _ = self.cell(self.body(x))
        return [cell, self.head(cell)]


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("half", "mode", "ops", "again"),
    [
        ("float16", "amp", "default", pickled),
        ("bfloat16", "mixed", "default", copy.deepcopy),
        ("float16", "mixed", "none", copy.deepcopy),
        ("bfloat16", "mixed", "none", pickled),
    ],
)
def test_a_prepared_model(
    half: str, mode: str, ops: str, again: Callable[[nn.Module], Any]
) -> None:
    lists = OpLists.named(ops)
    pinned = OpLists(lists.allow, lists.deny, lists.infer, {"body": "half", "head": "fp32"})
    precision, model, x = Precision(mode, half, ops=pinned), Net(), torch.rand(2, 3, 8)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    copied = again(model)
    with precision.cast():
        expected, found = model(x), copied(x)
    assert same_bits(found, expected)
    # A pinned module gives fp32, unless what follows casts nothing itself.
    assert found[1].dtype == (torch.float32 if ops == "default" else HALVES[half])
    # The copy has hooks of its own: it follows a precision made anew, as after a restart.
    with Precision(mode, half, ops=OpLists(*_parts(pinned))).cast():
        assert same_bits(copied(x), expected)


def _parts(ops: OpLists) -> tuple[Any, ...]:
    return ops.allow, ops.deny, ops.infer, dict(ops.modules)
