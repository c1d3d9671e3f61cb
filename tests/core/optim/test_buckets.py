"""An update by buckets equals one over everything bit for bit, and holds few fp32 gradients."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from vocabulary import HALVES, same_bits, tensors

from mpframe import Backoff, MasterWeights, Static
from mpframe.core.optim import gradients, master_weights
from mpframe.core.optim.masters import round_into

BY_PARAMETER = sorted(master_weights._STEPS_BY_PARAMETER, key=lambda cls: cls.__name__)
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
CASES = [
    *((cls, "", half) for cls, half in zip(BY_PARAMETER, itertools.cycle(HALVES))),
    *((cls, "fused", half) for cls, half in zip((SGD, AdamW), HALVES, strict=True)),
    *((cls, "foreach", half) for cls, half in zip((AdamW, SGD), HALVES, strict=True)),
    (torch.optim.Adagrad, "fused", "bfloat16"),
]
SHAPES = [(3, 4), (4, 4), (5, 3), (2, 2)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights of `SHAPES` in the last bucket, one in each of the others; none are few."""
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 20)
    monkeypatch.setattr(gradients, "_FEW", 0)


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dtype = itertools.cycle(dtypes)
    return [nn.Parameter(torch.randn(s, generator=generator).to(next(dtype))) for s in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def counted(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients the optimizer is given at each of its steps."""
    calls: list[int] = []
    step = optimizer.step

    def count() -> Any:
        calls.append(sum(p.grad is not None for g in optimizer.param_groups for p in g["params"]))
        return step()

    monkeypatch.setattr(optimizer, "step", count)
    return calls


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    yield
    handle.remove()


@pytest.mark.parametrize(("cls", "kind", "half"), CASES)
def test_buckets_equal_one_step_bit_for_bit(
    cls: Any, kind: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where fp32 weights are among them, and one has no gradient in some of the steps."""
    runs = []
    for size, few in ((20, 0), (10**9, 0), (10**9, 10**9)):
        monkeypatch.setattr(gradients, "_SIZE_ON_CPU", size)
        monkeypatch.setattr(gradients, "_FEW", few)
        params = parameters(HALVES[half], torch.float32, HALVES[half], HALVES[half])
        wrapped = MasterWeights(cls(params, lr=0.05, **({kind: True} if kind else {})))
        assert len(wrapped._buckets) == (2 if size == 20 else 1)
        scaler = Backoff(init_scale=2.0**10, half=half)
        results = []
        for step in range(4):
            set_gradients(params, step, 2.0**10)
            if step == 1:
                params[0].grad = None
            if step == 2:
                params[3].grad = torch.full_like(params[3], torch.inf)
            results.append(wrapped.step(scaler, max_norm=1.0))
        assert [bool(result.skipped) for result in results] == [False, False, True, False]
        masters = [wrapped.master_of(p) for p in params]
        state = tensors([list(own.values()) for own in wrapped.optimizer.state.values()])
        numbers = [x for result in results for x in (result.amax, result.grad_norm)]
        runs.append([*params, *masters, *state, *numbers])
    by_buckets, in_one, widened_at_once = runs
    assert same_bits(by_buckets, in_one)
    assert same_bits(by_buckets, widened_at_once)


def test_each_step_gets_the_gradients_of_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(torch.float16)
    wrapped = MasterWeights(torch.optim.AdamW(params))
    calls = counted(wrapped.optimizer, monkeypatch)
    set_gradients(params, 0)
    wrapped.step()
    assert calls == [1, 1, 2]


def test_half_gradients_are_given_back_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(torch.float16)
    wrapped = MasterWeights(torch.optim.AdamW(params))
    set_gradients(params, 0)
    alive = [weakref.ref(p.grad) for p in params if p.grad is not None]
    left: list[int] = []
    step: Any = wrapped.optimizer.step
    monkeypatch.setattr(
        wrapped.optimizer,
        "step",
        lambda: (left.append(sum(ref() is not None for ref in alive)), step()),
    )
    wrapped.step(max_norm=1.0)
    assert left == [3, 2, 0]


class GlobalNorm(torch.optim.SGD):
    """Someone's optimizer that looks at all gradients together."""


@pytest.mark.parametrize("what", ["a class of a user", "a hook", "a hook on all optimizers"])
def test_who_looks_at_all_gradients_is_stepped_once(
    what: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    params = parameters(torch.float16)
    cls = GlobalNorm if what == "a class of a user" else torch.optim.SGD
    wrapped = MasterWeights(cls(params, lr=0.1))
    if what == "a hook":
        wrapped.register_step_post_hook(lambda *_: None)
    if what == "a hook on all optimizers":
        request.getfixturevalue("global_hook")
    calls = counted(wrapped.optimizer, monkeypatch)
    set_gradients(params, 0)
    wrapped.step()
    assert calls == [len(params)]


def test_a_weight_that_others_wrote_is_adopted_in_its_bucket() -> None:
    params = parameters(torch.float16)
    wrapped = MasterWeights(torch.optim.SGD(params, lr=1.0))
    with torch.no_grad():
        params[1].fill_(3.0)
        params[2].data.fill_(5.0)
    set_gradients(params, 0, 0.0)
    params[2].grad = None
    wrapped.step()
    assert same_bits(
        [wrapped.master_of(p).unique() for p in params[1:3]],
        [torch.tensor([3.0]), torch.tensor([5.0])],
    )


@pytest.mark.parametrize(("half", "size"), [("float16", 10), ("float16", 2**15), ("bfloat16", 10)])
def test_rounding_holds_what_is_beyond_the_range(half: str, size: int) -> None:
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


def test_the_norm_is_that_of_the_unscaled_values() -> None:
    params = parameters(torch.float16, torch.float32)
    set_gradients(params, 0, 2.0**8)
    grads = [p.grad.float() / 2.0**8 for p in params if p.grad is not None]
    result = MasterWeights(torch.optim.SGD(params, lr=0.1)).step(Static(2.0**8))
    norms = torch.stack([torch.linalg.vector_norm(g) for g in grads])
    assert torch.equal(result.grad_norm, torch.linalg.vector_norm(norms))
    assert torch.equal(result.amax, torch.stack([g.abs().max() for g in grads]).max())
