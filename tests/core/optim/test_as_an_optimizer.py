"""`MasterWeights` where a `torch.optim.Optimizer` is wanted: schedules, hooks, copies."""

import copy
import pickle

import pytest
import torch
from fixtures import refused
from small_steps import FP32, HALF, INF, SGD, one, state_tensors
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from vocabulary import same_bits

from mpframe import MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError


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
