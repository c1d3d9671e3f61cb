"""A step is all or nothing: it skips without a trace, and consumes its gradients."""

import itertools

import pytest
import small_steps as small
import torch
from fixtures import needs_torch, refused
from small_steps import BFLOAT16, FP32, HALF, INF, NAN, SGD, STEPPING, AdamW, give, one, wrapped
from vocabulary import same_bits

from mpframe import Backoff, LogMax, MasterWeights, Static
from mpframe.core.errors import ConfigError

Adagrad, SparseAdam = torch.optim.Adagrad, torch.optim.SparseAdam
WAYS = [(0, FP32, INF, 1.0), (2, HALF, NAN, None), (2, BFLOAT16, -INF, None)]
SKIPS = [
    *((c, {}, *w) for c, w in zip(STEPPING, itertools.cycle(WAYS)) if c is not SparseAdam),
    *((SGD, {"fused": True, "momentum": 0.9}, *way) for way in WAYS),
    *((cls, {"fused": True}, *WAYS[0]) for cls in (torch.optim.Adam, Adagrad)),
    (AdamW, {"fused": True}, *WAYS[1]),
    (SGD, {}, *WAYS[1]),
    (SGD, {}, 0, FP32, NAN, None),
]


@pytest.mark.parametrize(("cls", "options", "steps_before", "dtype", "bad", "clip"), SKIPS)
def test_a_skip_leaves_every_bit(cls, options, steps_before, dtype, bad, clip) -> None:
    params, optimizer = wrapped(dtype, cls, **options)
    for step in range(steps_before):
        give(params, step, cls)
        optimizer.step()
    before = small.snapshot(optimizer, params)
    grads = small.gradients(9, cls)
    grads[1][0, 0] = bad
    small.set_gradients(params, grads)
    result = optimizer.step(max_norm=clip)
    assert result.skipped
    assert not torch.isfinite(result.amax)
    assert small.unchanged(before, optimizer, params)
    give(params, 10, cls)
    assert not optimizer.step().skipped
    assert not small.unchanged(before, optimizer, params)


skips_by_itself = needs_torch("2.15", "has a fused Adagrad that skips by itself")


@pytest.mark.parametrize(
    ("cls", "waits"),
    [
        (SGD, False),
        (SGD, True),
        (AdamW, True),
        pytest.param(Adagrad, True, marks=skips_by_itself),
    ],
)
def test_after_a_skip_the_next_steps_are_as_if_it_had_not_been(cls, waits, request) -> None:
    """Also where the fused kernel takes the verdict, and where the first step is skipped."""
    if waits:
        request.getfixturevalue("waited_for")
    options = {"momentum": 0.9} if cls is SGD else {}
    runs = []
    for skips in ((0, 3), ()):
        params, optimizer = wrapped(FP32, cls, fused=True, **options)
        for step in range(6):
            if step in skips:
                give(params, step, cls, INF)
                optimizer.step()
            give(params, step, cls)
            optimizer.step()
        assert optimizer.skips_on_device == waits
        runs.append([*params, *small.state_tensors(optimizer.optimizer)])
    assert same_bits(*runs)


def test_a_mask_adds_to_the_verdict() -> None:
    weight, optimizer = one(torch.ones(1), lr=0.5)
    for gradient, masked in ((INF, False), (1.0, True), (1.0, False)):
        weight.grad = torch.full((1,), gradient)
        result = optimizer.step(skip_mask=torch.tensor(masked))
        assert bool(result.skipped) is (masked or gradient == INF)
    assert weight.item() == 0.5


@pytest.mark.parametrize("way", ["load", "add"])
@pytest.mark.usefixtures("waited_for")
def test_the_first_step_with_new_state_is_skipped_by_the_host(way) -> None:
    params = small.parameters()
    optimizer = MasterWeights(SGD(params[:2], lr=0.05, momentum=0.9, fused=True))
    fresh = optimizer.state_dict()
    for gradient in (1.0, INF):
        small.set_gradients(params, [torch.full((3, 4), gradient)] * 3)
        optimizer.step()
        if gradient == 1.0 and way == "load":
            optimizer.load_state_dict(fresh)
        elif gradient == 1.0:
            optimizer.add_param_group({"params": params[2:]})
        assert bool(optimizer.skips_on_device) is False


@pytest.mark.parametrize("make", [Static, LogMax])
def test_the_scaler_hears_of_every_step_once(make) -> None:
    (params, optimizer), scaler, seen = wrapped(HALF), make(), []
    update, used = scaler.update, scaler.scale.item()
    scaler.update = lambda amax: (seen.append(amax.item()), update(amax))
    for factor in (1.0, INF):
        small.set_gradients(params, [torch.ones(3, 4) * factor] * 3)
        result = optimizer.step(scaler)
    assert (seen, bool(result.skipped)) == ([1 / used, INF], True)


@pytest.mark.parametrize(
    ("dtype", "keep", "way", "cls"),
    [
        (FP32, True, "step", SGD),
        (HALF, True, "skip", SGD),
        (HALF, False, "accumulate", SGD),
        (HALF, True, "skip_mask", SparseAdam),
        (FP32, True, "device", SGD),
        (HALF, True, "accumulate", SparseAdam),
        (HALF, False, "step", SparseAdam),
    ],
)
def test_a_step_leaves_no_gradient_and_a_second_one_is_refused(dtype, keep, way, cls) -> None:
    params, optimizer = wrapped(dtype, keep_masters=keep, fused=way == "device")
    for step in range(2):
        give(params, step, cls, INF if way == "skip" else 1.0)
        if way == "accumulate":
            optimizer.accumulate()
            give(params, step, cls)
        optimizer.step(skip_mask=torch.tensor(True) if way == "skip_mask" else None)
        assert [p.grad for p in params] == [None] * 3
        assert [optimizer.master_of(p).grad for p in params] == [None] * 3
        before = small.snapshot(optimizer, params)
        said = refused(ConfigError, optimizer.step, Backoff(), max_norm=1.0)
        assert small.unchanged(before, optimizer, params)
    assert said == (
        "optimizer.step: the step before has consumed the gradients and no backward pass has "
        "left new ones; call backward, or zero_grad where a step without gradients is meant"
    )
    for between in (
        *(optimizer.zero_grad, optimizer.accumulate, lambda: give(params, 0)),
        lambda: optimizer.master_of(params[0]).square().sum().backward(),
    ):
        between()
        optimizer.step()
