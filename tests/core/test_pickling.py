"""Pickled and copied: a prepared model goes on following the casts, without optimizer in fp32."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision
from mpframe.training.optimizers.split_master import SplitMaster


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


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


class TestCopies:
    """A copy without its optimizer is fp32, one with it is as it was."""

    @pytest.mark.parametrize(("turned", "kept"), [(False, True), (True, True), (True, SplitMaster)])
    def test_a_pair_in_any_order_stays_half(self, turned: bool, kept: Any) -> None:
        model, optimizer = Precision("mixed", "bfloat16", master_weights=kept).prepare(*pair())
        given: Any = (optimizer, model) if turned else (model, optimizer)
        copied = copy.deepcopy(given)
        other, twin = reversed(copied) if turned else copied
        assert same_bits(model.parameters(), other.parameters())
        assert same_bits(
            [optimizer.master_of(p) for p in model.parameters()],
            [twin.master_of(p) for p in other.parameters()],
        )

    def test_a_part_of_a_model_and_a_copy_of_a_copy(self) -> None:
        model, _ = Precision("mixed").prepare(
            nn.Sequential(*[pair()[0]]), torch.optim.AdamW([torch.ones(1)])
        )
        part = copy.deepcopy(model[0])
        assert {p.dtype for p in part.parameters()} == {torch.float32}
        assert same_bits(copy.deepcopy(part).parameters(), part.parameters())
        shallow = copy.deepcopy(vars(model[0]))
        assert shallow["_parameters"]["weight"].dtype == torch.float16

    def test_a_pickled_model_holds_nothing_of_mpframe(self) -> None:
        model, _ = Precision("mixed").prepare(*pair())
        assert b"mpframe" not in pickle.dumps(model)
        assert {p.dtype for p in pickle.loads(pickle.dumps(model)).parameters()} == {torch.float16}
