"""What is saved of optimizer and masters, and weights beyond the half range."""

import copy
import itertools

import pytest
import small_steps as small
import torch
from small_steps import FP32, HALF, SGD, STEPPING, AdamW, give, state_tensors, wrapped
from torch import nn
from vocabulary import same_bits

from mpframe import MasterWeights, Precision
from mpframe.core.errors import CheckpointError
from mpframe.training.callbacks.guards import saturation_warning


def trained(cls, dtype=HALF):
    params, optimizer = wrapped(dtype, cls)
    for step in range(2):
        give(params, step, cls)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(
    ("cls", "dtype"), [*zip(STEPPING, itertools.cycle([HALF, FP32])), (SGD, FP32)]
)
def test_resuming_is_exact(cls, dtype) -> None:
    (params, optimizer), (others, resumed) = trained(cls, dtype), wrapped(dtype, cls)
    for p, source in zip(others, params, strict=True):  # fp32 weights are the model's to save
        p.data.copy_(source.data) if dtype == FP32 else p.data.zero_()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same_bits(others, params)
    for owner, own in ((optimizer, params), (resumed, others)):
        give(own, 7, cls)
        owner.step()
    assert same_bits([*others, *state_tensors(resumed)], [*params, *state_tensors(optimizer)])


def test_into_a_plain_optimizer_and_back() -> None:
    _, optimizer = trained(AdamW)
    plain = AdamW(small.parameters(), lr=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.05
    assert same_bits(state_tensors(plain), state_tensors(optimizer))
    params, again = trained(AdamW)
    masters = [again.master_of(p).detach().clone() for p in params]
    again.load_state_dict(plain.state_dict())
    assert same_bits(state_tensors(again), state_tensors(plain))
    assert same_bits([again.master_of(p) for p in params], masters)


def test_a_state_of_other_parameters_is_refused_and_nothing_loaded() -> None:
    params, optimizer = trained(AdamW)
    before = small.snapshot(optimizer, params)
    fewer = MasterWeights(AdamW([nn.Parameter(torch.zeros(2))])).state_dict()
    shapes = {**optimizer.state_dict(), "masters": [torch.zeros(2)] * 3}
    groups = AdamW([{"params": [p]} for p in params]).state_dict()
    for state, said in (
        (fewer, "holds 1 masters, and not the shapes of the model's 3"),
        (shapes, "load it into the model it was made with"),
        (groups, r"^optimizer state: .*load it into the model"),
    ):
        with pytest.raises(CheckpointError, match=said):
            optimizer.load_state_dict(state)
    assert small.unchanged(before, optimizer, params)


def test_weights_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    model, optimizer = Precision("mixed").prepare(model, SGD(model.parameters(), 0.1))
    masters = optimizer.masters_by_name(model)
    weights = {name: torch.randn_like(t, dtype=FP32) for name, t in masters.items()}
    weights |= {name: torch.ones_like(b) for name, b in model.named_buffers()}
    optimizer.load_masters(model, weights)
    loaded = [optimizer.master_of(model[0].weight), model[0].weight, model[2].running_mean]
    own = weights["0.weight"]
    assert same_bits(loaded, [own, own.half(), torch.ones(3)])
    before = small.snapshot(optimizer, [*model.parameters()])
    one_less = {name: value for name, value in weights.items() if name != "1.bias"}
    for broken, said in (
        (one_less, "'1.bias' is missing from the checkpoint"),
        (weights | {"more": torch.ones(1)}, "'more' is unknown to the model"),
        (weights | {"1.bias": torch.ones(2)}, r"has shape \(2,\) in the checkpoint and \(3,\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            optimizer.load_masters(model, broken)
    assert small.unchanged(before, optimizer, [*model.parameters()])


def test_a_weight_beyond_the_range_is_held_at_its_end_and_never_inf() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[1e5, -1e9], [65504.0, 1.0]]))
    model, optimizer = Precision("mixed").prepare(model, SGD(model.parameters(), lr=1.0))
    for third in (65504.0, 65504.0 + 60000.0):
        assert model.weight.tolist() == [[65504.0, -65504.0], [65504.0, 1.0]]
        assert optimizer.master_of(model.weight).tolist() == [[1e5, -1e9], [third, 1.0]]
        model.weight.grad = torch.tensor([[0.0, 0.0], [-60000.0, 0.0]], dtype=HALF)
        optimizer.step()
    assert saturation_warning(optimizer, model) == (
        "3 weights lie beyond the half range and are held at its end (weight); their masters "
        "go on: lower optimizer.lr, use dtype.half=bfloat16, or pin the module with "
        "ops.modules=...:fp32"
    )


@pytest.mark.parametrize("mode", ["mixed", "fp32", "amp"])
def test_of_the_layers_beyond_it_those_with_most_weights_there_come_first(mode) -> None:
    model = nn.Sequential(*(nn.Linear(4, 1, bias=False) for _ in range(4)))
    for count, layer in enumerate(model, start=1):
        layer.weight.data[0, :count] = 1e5
    _, optimizer = Precision(mode).prepare(model, SGD(model.parameters()))
    said = saturation_warning(optimizer, model)
    first = "10 weights lie beyond the half range and are held at its end (3.weight, 2.weight, 1."
    assert said.startswith(first) if mode == "mixed" else said is None
