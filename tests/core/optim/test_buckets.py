"""An update by buckets equals one over everything bit for bit, and holds few fp32 gradients."""

import itertools
import weakref

import pytest
import torch
from small_steps import SGD, AdamW, set_gradients, state_tensors
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from vocabulary import HALVES, same_bits

from mpframe import Backoff, MasterWeights
from mpframe.core.optim import gradients, master_weights
from mpframe.core.optim.masters import round_into

BY_PARAMETER = sorted(master_weights._STEPS_BY_PARAMETER, key=lambda cls: cls.__name__)
CASES = [
    *((cls, "", half) for cls, half in zip(BY_PARAMETER, itertools.cycle(HALVES))),
    *((cls, "fused", half) for cls, half in zip((SGD, AdamW), HALVES, strict=True)),
    *((cls, "foreach", half) for cls, half in zip((AdamW, SGD), HALVES, strict=True)),
    (torch.optim.Adagrad, "fused", "bfloat16"),
]
SHAPES = [(3, 4), (4, 4), (5, 3), (2, 2)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch) -> None:
    """Two weights of `SHAPES` in the last bucket, one in each of the others; none are few."""
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 20)
    monkeypatch.setattr(gradients, "_FEW", 0)


def parameters(*dtypes):
    generator, dtype = torch.Generator().manual_seed(0), itertools.cycle(dtypes)
    return [nn.Parameter(torch.randn(s, generator=generator).to(next(dtype))) for s in SHAPES]


def give(params, step, scale=1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    set_gradients(params, [torch.randn(p.shape, generator=generator) for p in params], scale)


@pytest.mark.parametrize(("cls", "kind", "half"), CASES)
def test_buckets_equal_one_step_bit_for_bit(cls, kind, half, monkeypatch) -> None:
    """Also where fp32 weights are among them, and one has no gradient in some of the steps."""
    runs = []
    for size, few in ((20, 0), (10**9, 0), (10**9, 10**9)):
        monkeypatch.setattr(gradients, "_SIZE_ON_CPU", size)
        monkeypatch.setattr(gradients, "_FEW", few)
        params = parameters(HALVES[half], torch.float32, HALVES[half], HALVES[half])
        optimizer = MasterWeights(cls(params, lr=0.05, **({kind: True} if kind else {})))
        assert len(optimizer._buckets) == (2 if size == 20 else 1)
        scaler = Backoff(init_scale=2.0**10, half=half)
        results = []
        for step in range(4):
            give(params, step, 2.0**10)
            if step == 1:
                params[0].grad = None
            if step == 2:
                params[3].grad = torch.full_like(params[3], torch.inf)
            results.append(optimizer.step(scaler, max_norm=1.0))
        assert [bool(result.skipped) for result in results] == [False, False, True, False]
        masters = [optimizer.master_of(p) for p in params]
        numbers = [x for result in results for x in (result.amax, result.grad_norm)]
        runs.append([*params, *masters, *state_tensors(optimizer.optimizer), *numbers])
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


def left_at_each_step(optimizer, params, monkeypatch):
    """How many of the half gradients still exist at each step of the optimizer that is wrapped."""
    give(params, 0)
    alive, left, step = [weakref.ref(p.grad) for p in params], [], optimizer.optimizer.step

    def look():
        left.append(sum(ref() is not None for ref in alive))
        return step()

    monkeypatch.setattr(optimizer.optimizer, "step", look)
    optimizer.step(max_norm=1.0)
    return left


def test_half_gradients_are_given_back_as_they_are_used(monkeypatch) -> None:
    params = parameters(torch.float16)
    assert left_at_each_step(MasterWeights(AdamW(params)), params, monkeypatch) == [3, 2, 0]


@pytest.mark.parametrize("who", ["someone's optimizer", "a hook", "a hook on all"])
def test_who_looks_at_all_gradients_is_stepped_once(who, monkeypatch, request) -> None:
    params = parameters(torch.float16)
    cls = type("GlobalNorm", (SGD,), {}) if who == "someone's optimizer" else SGD
    optimizer = MasterWeights(cls(params, lr=0.1))
    if who == "a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif who == "a hook on all":
        request.addfinalizer(register_optimizer_step_pre_hook(lambda *_: None).remove)
    assert left_at_each_step(optimizer, params, monkeypatch) == [0]


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
