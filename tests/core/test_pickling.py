"""Pickled and copied: a prepared model goes on following the casts, without optimizer in fp32."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from vocabulary import HALVES, inside, same_bits

from mpframe import OpLists, Precision


def pickled(model):
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
def test_a_prepared_model(half, mode, ops, again) -> None:
    def run(model):
        cell, _ = model[1](model[0](x))
        return [cell, model[2](cell)]

    model, x = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 8)), torch.rand(2, 3, 8)
    lists = replace(OpLists.named(ops), modules={"0": "half", "2": "fp32"})
    own, anew = (Precision(mode, half, ops=lists) for _ in range(2))
    own.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    copied = again(model)
    expected, found = (inside(own, run)(given) for given in (model, copied))
    assert same_bits(found, expected)
    # A pinned module gives fp32, unless what follows casts nothing itself.
    assert found[1].dtype == (torch.float32 if ops == "default" else HALVES[half])
    # The copy has hooks of its own: it follows a precision made anew, as after a restart.
    assert same_bits(inside(anew, run)(copied), expected)


def test_a_copied_pair_stays_half_and_a_copy_of_the_model_alone_is_fp32() -> None:
    model, precision = nn.Sequential(nn.Linear(4, 4)), Precision("mixed", "bfloat16")
    _, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters()))
    masters = [optimizer.master_of(p) for p in model.parameters()]
    for turned in (False, True):
        copied = copy.deepcopy((optimizer, model) if turned else (model, optimizer))
        other, twin = reversed(copied) if turned else copied
        assert same_bits(model.parameters(), other.parameters())
        assert same_bits(masters, [twin.master_of(p) for p in other.parameters()])
    part = copy.deepcopy(model[0])
    assert same_bits(part.parameters(), masters)
    assert same_bits(copy.deepcopy(part).parameters(), part.parameters())
    shallow = copy.deepcopy(vars(model[0]))
    assert shallow["_parameters"]["weight"].dtype == torch.bfloat16
    assert b"mpframe" not in pickle.dumps(model)  # It needs nothing of it.
    assert same_bits(pickled(model).parameters(), model.parameters())
