"""`MasterWeights` where a `torch.optim.Optimizer` is wanted: schedules, hooks, copies, states."""

import copy
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import small_steps as small
import torch
from fixtures import Log, refused
from small_steps import FP32, HALF, INF, SGD, STEPPING, AdamW, give, one, state_tensors, wrapped
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from vocabulary import same_bits

from mpframe import MasterWeights, Precision, Static
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.training.callbacks.guards import SaturationWarning


def prepared(mode="mixed", half="float16"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    return Precision(mode, half).prepare(model, SGD(groups, lr=0.1, momentum=0.9))


def fill(model, value) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def step(optimizer, model, value=1.0) -> None:
    fill(model, value)
    optimizer.step()


def one_after_another(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize(
    "make",
    [
        one_after_another,
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
        lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=3),
    ],
)
def test_a_schedule_over_it_is_one_over_a_plain_optimizer(make) -> None:
    """Rates and momenta of each group in each step; a skipped one gives no warning of the order."""
    (model, wrapped), (plain_model, prepared_plain) = prepared(), prepared("fp32")
    plain = SGD([dict(group) for group in prepared_plain.optimizer.param_groups])
    schedules = make(wrapped), make(plain)
    for value in (INF, 1.0, 1.0, 1.0, 1.0):
        step(wrapped, model, value)
        step(plain, plain_model)
        for schedule in schedules:
            schedule.step()
        groups = (wrapped.param_groups, wrapped.optimizer.param_groups, plain.param_groups)
        for name in ("lr", "momentum"):
            for own, inner, other in zip(*groups, strict=True):
                assert own[name] == inner[name] == other[name]


def test_a_closure_computes_the_gradients_of_a_step_which_may_overflow_and_is_scaled() -> None:
    """Lightning and torch's users call `step(closure)`; hooks see the steps that are taken."""
    (model, wrapped), (plain_model, plain), seen = prepared(), prepared(), []
    wrapped.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    wrapped.register_state_dict_pre_hook(lambda optimizer: seen.append(optimizer))
    result = wrapped.step(lambda: fill(model, INF))
    assert (bool(result.skipped), result.loss, seen) == (True, None, [])
    inputs, options = torch.linspace(-1, 1, 8).view(2, 4), {"scaler": Static(4.0), "max_norm": 1.0}

    def closure(model=model):
        with Precision("mixed").cast():
            loss = model(inputs).float().pow(2).mean() * 4.0
        loss.backward()
        return loss

    result, loss = wrapped.step(closure=closure, **options), closure(plain_model)
    assert plain.step(**options).loss is None
    assert same_bits([result.loss, *model.parameters()], [loss, *plain_model.parameters()])
    assert wrapped.step(closure).loss != loss
    wrapped.state_dict()
    assert seen == [wrapped.optimizer] * 3


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize(
    ("half", "copied", "scheduled"),
    [("float16", copy.deepcopy, True), ("bfloat16", pickled, True), ("float16", pickled, False)],
)
def test_a_copy_goes_on_by_itself_and_has_its_masters(half, copied, scheduled) -> None:
    pair = prepared(half=half)
    if scheduled:  # It has put a function of its own in the place of `step`.
        lr_scheduler.StepLR(pair[1], 1)
    step(pair[1], pair[0])
    model, optimizer = copied(pair)
    kept = [m.clone() for m in optimizer.masters_by_name(model).values()]
    step(pair[1], pair[0])
    assert same_bits(optimizer.masters_by_name(model).values(), kept)
    step(optimizer, model)
    assert same_bits(model.parameters(), pair[0].parameters())
    both = ((model, optimizer), pair)
    assert same_bits(*(own.masters_by_name(of).values() for of, own in both))
    assert same_bits(*(state_tensors(own) for _, own in both))
    # It has one master for each weight, also for a second optimizer over the copied model.
    _, second = Precision("mixed", half).prepare(model, SGD(model.parameters(), lr=0.1))
    weight = model[0].weight
    assert second.master_of(weight) is optimizer.master_of(weight)
    with pytest.raises(ConfigError, match="has its masters already"):
        MasterWeights(optimizer.optimizer)
    weight.data.clamp_(-0.1, 0.1)
    second.step(closure=lambda: fill(model, 0.0))
    assert weight.abs().max() <= 0.1


@pytest.mark.parametrize(
    ("mode", "copied"), [("fp32", copy.deepcopy), ("amp", lambda pair: pair), ("mixed", pickled)]
)
def test_the_optimizer_from_before_does_not_step(mode, copied) -> None:
    """Without its wrapper it would move no half weight, and unscale nothing."""
    model, wrapped = copied(prepared(mode))
    old = wrapped.optimizer
    schedule = lr_scheduler.StepLR(old, 1)
    step(wrapped, model)
    schedule.step()
    wrapped.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(wrapped, model)
    before = [parameter.clone() for parameter in model.parameters()]
    fill(model, 1.0)
    said = "has its masters already; use what precision.prepare returned, or make a new optimizer"
    assert refused(ConfigError, old.step) == f"optimizer=SGD: {said}"
    assert same_bits(model.parameters(), before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_a_step_raises_the_version_of_what_it_moved(dtype, fused) -> None:
    """By it a kept cast knows that it is old; torch's fused kernels do not raise it."""
    weight, wrapped = one(torch.ones(2, dtype=dtype), fused=fused)
    for _ in range(2):
        watched = [weight, wrapped.master_of(weight)]
        before = [tensor._version for tensor in watched]
        weight.grad = torch.ones_like(weight)
        wrapped.step()
        assert all(t._version > old for t, old in zip(watched, before, strict=True))


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


@pytest.mark.parametrize("mode", ["mixed", "fp32", "amp"])
def test_of_the_layers_beyond_it_those_with_most_weights_there_come_first(
    mode, caplog: Log
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 1, bias=False) for _ in range(4)))
    for count, layer in enumerate(model, start=1):
        layer.weight.data[0, :count] = 1e5
    _, optimizer = Precision(mode).prepare(model, SGD(model.parameters()))
    said = (
        "warning: 10 weights lie beyond the half range and are held at its end (3.weight, "
        "2.weight, 1.weight and 1 more); their masters go on: lower optimizer.lr, use "
        "dtype.half=bfloat16, or pin the module with ops.modules=...:fp32"
    )
    trainer: Any = SimpleNamespace(optimizer=optimizer, model=model)
    SaturationWarning().on_epoch_end(trainer)
    assert caplog.messages == ([said] if mode == "mixed" else [])
