"""Pickled and copied: a prepared model goes on following the casts, without optimizer in fp32."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision
from mpframe.training.optimizers.split_master import SplitMaster


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
def test_a_prepared_model(half: str, mode: str, ops: str, again: Callable[[Any], Any]) -> None:
    """With a recurrent layer, which fits its inputs, and two layers that are pinned."""

    def precision() -> Precision:
        pins = {"0": "half", "2": "fp32"}
        return Precision(mode, half, ops=replace(OpLists.named(ops), modules=pins))

    def run(model: Any) -> list[Tensor]:
        cell, _ = model[1](model[0](x))
        return [cell, model[2](cell)]

    own, x = precision(), torch.rand(2, 3, 8)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8))
    own.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    copied = again(model)
    with own.cast():
        expected, found = run(model), run(copied)
    assert same_bits(found, expected)
    # A pinned module gives fp32, unless what follows casts nothing itself.
    assert found[1].dtype == (torch.float32 if ops == "default" else HALVES[half])
    # The copy has hooks of its own: it follows a precision made anew, as after a restart.
    with precision().cast():
        assert same_bits(run(copied), expected)


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
        masters = [optimizer.master_of(p) for p in model.parameters()]
        assert same_bits(masters, [twin.master_of(p) for p in other.parameters()])

    def test_a_part_of_a_model_and_a_copy_of_a_copy(self) -> None:
        whole, optimizer = nn.Sequential(nn.Linear(4, 4)), torch.optim.AdamW([torch.ones(1)])
        model, _ = Precision("mixed").prepare(whole, optimizer)
        part = copy.deepcopy(model[0])
        assert {p.dtype for p in part.parameters()} == {torch.float32}
        assert same_bits(copy.deepcopy(part).parameters(), part.parameters())
        shallow = copy.deepcopy(vars(model[0]))
        assert shallow["_parameters"]["weight"].dtype == torch.float16

    def test_a_pickled_model_holds_nothing_of_mpframe(self) -> None:
        model, _ = Precision("mixed").prepare(*pair())
        assert b"mpframe" not in pickle.dumps(model)
        assert {p.dtype for p in pickle.loads(pickle.dumps(model)).parameters()} == {torch.float16}
