"""A step is all or nothing: it skips without a trace, and consumes its gradients.

An update by buckets equals one over everything bit for bit, and holds few fp32 gradients.
"""

import itertools
import weakref

import pytest
import small_steps as small
import torch
from fixtures import has_torch, refused
from small_steps import BFLOAT16, FP32, HALF, INF, NAN, SGD, STEPPING, AdamW, give, one, wrapped
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from vocabulary import HALVES, same_bits

from mpframe import Backoff, LogMax, MasterWeights, Static
from mpframe.core.errors import ConfigError
from mpframe.core.optim import gradients, master_weights
from mpframe.core.optim.masters import round_into

Adagrad, SparseAdam = torch.optim.Adagrad, torch.optim.SparseAdam
WAYS = [(0, FP32, INF, 1.0), (2, HALF, NAN, None), (2, BFLOAT16, -INF, None)]
DENSE, FUSED = [c for c in STEPPING if c is not SparseAdam], {"fused": True}
SKIPS = [
    *((cls, {}, *way) for cls, way in zip(DENSE, itertools.cycle(WAYS))),
    *((SGD, FUSED | {"momentum": 0.9}, *way) for way in WAYS),
    *((AdamW, FUSED, *WAYS[1]), (Adagrad, FUSED, *WAYS[0])),
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


@pytest.mark.parametrize(
    ("cls", "waits"), [(SGD, False), (SGD, True), (AdamW, True), (Adagrad, has_torch("2.15"))]
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


BY_PARAMETER = sorted(master_weights._STEPS_BY_PARAMETER, key=lambda cls: cls.__name__)
BUCKETED = [
    *((cls, "", half) for cls, half in zip(BY_PARAMETER, itertools.cycle(HALVES))),
    *((cls, "fused", half) for cls, half in zip((SGD, AdamW), HALVES, strict=True)),
    *((cls, "foreach", half) for cls, half in zip((AdamW, SGD), HALVES, strict=True)),
    (Adagrad, "fused", "bfloat16"),
]
SHAPES = [(3, 4), (4, 4), (5, 3), (2, 2)]


def shaped(*dtypes):
    generator, dtype = torch.Generator().manual_seed(0), itertools.cycle(dtypes)
    return [nn.Parameter(torch.randn(s, generator=generator).to(next(dtype))) for s in SHAPES]


def give_shaped(params, step, scale=1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(p.shape, generator=generator) for p in params]
    small.set_gradients(params, grads, scale)


@pytest.mark.parametrize(("cls", "kind", "half"), BUCKETED)
def test_buckets_equal_one_step_bit_for_bit(cls, kind, half, monkeypatch) -> None:
    """Also where fp32 weights are among them, and one has no gradient in some of the steps."""
    runs = []
    for size, few in ((20, 0), (10**9, 0), (10**9, 10**9)):
        monkeypatch.setattr(gradients, "_SIZE_ON_CPU", size)
        monkeypatch.setattr(gradients, "_FEW", few)
        params = shaped(HALVES[half], FP32, HALVES[half], HALVES[half])
        optimizer = MasterWeights(cls(params, lr=0.05, **({kind: True} if kind else {})))
        assert len(optimizer._buckets) == (2 if size == 20 else 1)
        scaler = Backoff(init_scale=2.0**10, half=half)
        results = []
        for step in range(4):
            give_shaped(params, step, 2.0**10)
            if step == 1:
                params[0].grad = None
            if step == 2:
                params[3].grad = torch.full_like(params[3], torch.inf)
            results.append(optimizer.step(scaler, max_norm=1.0))
        assert [bool(result.skipped) for result in results] == [False, False, True, False]
        masters = [optimizer.master_of(p) for p in params]
        numbers = [x for result in results for x in (result.amax, result.grad_norm)]
        runs.append([*params, *masters, *small.state_tensors(optimizer.optimizer), *numbers])
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


@pytest.mark.parametrize(
    "who", ["torch's optimizer", "someone's optimizer", "a hook", "a hook on all"]
)
def test_half_gradients_are_given_back_as_they_are_used_but_who_looks_at_all_is_stepped_once(
    who, monkeypatch, request
) -> None:
    """Two weights of `SHAPES` are in the last bucket, one in each of the others; none are few."""
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 20)
    monkeypatch.setattr(gradients, "_FEW", 0)
    params = shaped(HALF)
    cls = type("GlobalNorm", (SGD,), {}) if who == "someone's optimizer" else SGD
    optimizer = MasterWeights(cls(params, lr=0.1))
    if who == "a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif who == "a hook on all":
        request.addfinalizer(register_optimizer_step_pre_hook(lambda *_: None).remove)
    give_shaped(params, 0)
    alive, left, step = [weakref.ref(p.grad) for p in params], [], optimizer.optimizer.step

    def look():
        left.append(sum(ref() is not None for ref in alive))
        return step()

    monkeypatch.setattr(optimizer.optimizer, "step", look)
    optimizer.step(max_norm=1.0)
    assert left == ([3, 2, 0] if who == "torch's optimizer" else [0])


@pytest.mark.parametrize(("half", "size"), [("float16", 10), ("float16", 2**15), ("bfloat16", 10)])
def test_rounding_holds_what_is_beyond_the_range(half, size) -> None:
    """A small weight is clamped, a large one is looked at first."""
    end = torch.finfo(HALVES[half]).max
    fine = torch.randn(3, size)
    above, below = fine.clone(), fine.clone()
    above[0, 0], below[1, 1] = torch.inf, -torch.inf
    above[2, 2], below[2, 3] = 2 * 70000.0, -70000.0  # Beyond float16 alone.
    masters = [fine, above, below]
    weights = [torch.empty_like(m, dtype=HALVES[half]) for m in masters]
    round_into(zip(weights, masters, strict=True))
    assert same_bits(weights, [m.clamp(-end, end).to(HALVES[half]) for m in masters])
