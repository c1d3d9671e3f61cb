"""From scaled gradients to an update: unscaling, clipping and accumulation."""

import pytest
import small_steps as small
import torch
from small_steps import BFLOAT16, FP32, HALF, INF, NAN, SGD, AdamW, one, wrapped
from torch import nn
from vocabulary import same_bits

from mpframe import Backoff, MasterWeights, Static
from mpframe.core.optim import gradients


@pytest.fixture(autouse=True, params=[2**20, 0], ids=["widened at once", "widened by buckets"])
def _widened(request, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "_FEW", request.param)


@pytest.mark.parametrize(
    ("scale", "half", "bound", "accumulated"),
    [
        (2.0**8, FP32, None, False),
        (2.0**-3, HALF, None, False),
        (2.0**8, BFLOAT16, None, False),
        (2.0**4, FP32, 0.3, False),
        (2.0**4, HALF, 0.3, False),
        (2.0**4, BFLOAT16, 0.3, True),
    ],
)
def test_the_optimizer_is_given_unscaled_gradients(scale, half, bound, accumulated) -> None:
    """AdamW and a norm would hide a scale that was left in, so what it is given is looked at.

    0.3 is no number of either half format: the clamp comes after the cast to fp32.
    """
    params, optimizer = wrapped(half, AdamW)
    exact = [g.to(half) for g in small.gradients(0)]
    small.set_gradients(params, exact, scale)
    given = []
    masters = [optimizer.master_of(p) for p in params]
    optimizer.register_step_pre_hook(lambda *_: given.extend(m.grad.clone() for m in masters))
    if accumulated:
        optimizer.accumulate(scale)
    result = optimizer.step(Static(scale), max_value=bound)
    end = bound or INF
    assert same_bits(given, [g.float().clamp(-end, end) for g in exact])
    assert result.amax.item() == max(g.abs().max().item() for g in exact) > 0.3
    assert result.scale.item() == scale


def test_a_half_gradient_is_fp32_before_it_is_unscaled_and_before_its_norm() -> None:
    """2^-14 / 2^14 = 2^-28 is 0 in float16."""
    weight, optimizer = one(torch.zeros(100, dtype=HALF))
    for value, scale in ((2.0**-14, 2.0**14), (60000.0, 1.0)):
        before = optimizer.master_of(weight).clone()
        weight.grad = torch.full_like(weight, value)
        result = optimizer.step(Static(scale))
        assert result.grad_norm.item() == pytest.approx(10 * value / scale)
        assert torch.equal(optimizer.master_of(weight), before - value / scale)


@pytest.mark.parametrize("count", [1, torch.tensor(1)])
def test_sums_of_finite_gradients_are_no_overflow(count) -> None:
    """3e38 + 3e38 is inf; neither gradient is. Only a norm beyond fp32 cannot be clipped to."""
    weight, optimizer = one(torch.zeros(2), lr=1e-38)
    for value, clip, skipped in (
        *((3e38, 1.0, True), (INF, 1.0, True), (NAN, 1.0, True)),
        *((INF, None, True), (3e38, None, False)),
    ):
        weight.grad = torch.tensor([3e38, value])
        optimizer.accumulate(1.0, count)
        result = optimizer.step(max_norm=clip)
        assert bool(result.skipped) is skipped
        assert bool(weight.any()) is not skipped
    assert result.amax.item() == pytest.approx(3e38)


@pytest.mark.parametrize(("count", "window"), [(0, 1), (0, 2), (torch.tensor(0), 1)])
def test_a_clipped_step_without_samples_is_skipped(count, window) -> None:
    """Its norm is finite."""
    weight, optimizer = one(torch.zeros(2))
    for _ in range(window):
        weight.grad = torch.ones(2)
        optimizer.accumulate(1.0, count)
    assert optimizer.step(max_norm=1.0).skipped
    assert not weight.any()


@pytest.mark.parametrize(
    ("dtype", "values"), [(FP32, (2.0, INF, 8.0, NAN)), (HALF, (INF, 2.0, NAN, 8.0))]
)
def test_a_dropped_micro_batch_does_not_count(dtype, values) -> None:
    """The step is the mean of the good ones."""
    (weight, optimizer), scaler = one(torch.zeros(1, dtype=dtype)), Backoff(init_scale=4.0)
    amaxes = []
    for value in values:
        weight.grad = torch.full((1,), value, dtype=dtype)
        amaxes.append(optimizer.accumulate(scaler.scale).item())
        assert weight.grad is None
    result = optimizer.step(scaler)
    assert amaxes[values.index(2.0)] == 0.5
    assert (bool(result.skipped), result.dropped.item(), result.amax.item()) == (False, 2, 1.25)
    assert optimizer.master_of(weight).item() == -(2.0 + 8.0) / 4 / 2
    assert scaler.scale.item() == 2.0  # an overflow is an overflow, although the step goes on


def test_a_window_of_bad_ones_is_skipped_and_zero_grad_forgets_one() -> None:
    weight, optimizer = one(torch.ones(1))
    for value, forgotten, left in ((INF, False, 1.0), (0.5, True, 1.0), (0.5, False, 0.5)):
        for _ in range(2):
            weight.grad = torch.full((1,), value)
            optimizer.accumulate()
        if forgotten:
            optimizer.zero_grad()
        result = optimizer.step()
        assert (bool(result.skipped), weight.item()) == (value == INF, left)
    weight.grad = torch.full((1,), 0.5)
    assert optimizer.step().dropped is None  # the window is closed


@pytest.mark.parametrize(
    ("values", "seen", "amax"), [((8.0, -8.0, 1.0), 8.0, 1 / 3), ((3e38, 3e38), 3e38, INF)]
)
def test_the_scaler_sees_the_largest_micro_batch(values, seen, amax) -> None:
    """Half must hold each of them. A sum beyond fp32 is skipped, though none was dropped."""
    (weight, optimizer), scaler, told = one(torch.zeros(1)), Static(1.0), []
    scaler.update = lambda amax: told.append(amax.item())
    for value in values:
        weight.grad = torch.full((1,), value)
        optimizer.accumulate(scaler.scale)
    result = optimizer.step(scaler)
    assert told == [pytest.approx(seen)]
    assert result.amax.item() == pytest.approx(amax)
    assert (bool(result.skipped), int(result.dropped or 0)) == (amax == INF, 0)
    assert bool(weight) is (amax != INF)


@pytest.mark.parametrize(("last", "expected"), [(INF, -3.0), (0.0, -2.0)])
def test_sparse_micro_batches_and_duplicates_are_summed_in_fp32(last, expected) -> None:
    """64000 + 64000 is beyond float16, and both were finite."""
    weight, optimizer = one(torch.zeros(3, 1, dtype=HALF))
    for row, value in ((0, 2.0), (0, 4.0), (2, last)):
        weight.grad = small.sparse([row], torch.full((1, 1), value, dtype=HALF), (3, 1))
        optimizer.accumulate()
    optimizer.step()
    assert optimizer.master_of(weight).flatten().tolist() == [expected, 0.0, 0.0]
    weight.grad = small.sparse([1, 1], torch.full((2, 1), 64000.0, dtype=HALF), (3, 1))
    assert optimizer.step(Static(2.0)).amax.item() == 64000.0
    assert optimizer.master_of(weight).flatten().tolist() == [expected, -64000.0, 0.0]


@pytest.mark.parametrize("size", [2**22, 1])
@pytest.mark.parametrize("dtype", [FP32, torch.float64, BFLOAT16])
def test_a_window_is_the_mean_of_its_good_micro_batches(dtype, size, monkeypatch) -> None:
    """The gradients lie in another order in each micro-batch, and one weight misses the first.

    Counts of 0.3 and 0.6 are 1 and 2, exactly.
    """
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", size)
    weights = [nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for _ in range(2)]
    optimizer = MasterWeights(SGD(weights, lr=1.0))
    torch.manual_seed(0)
    first, bad, last = (torch.randint(-128, 128, (3, 5)).to(dtype) for _ in range(3))
    bad[2, 4], last = NAN, last[:1].expand(3, 5)
    one, two = torch.tensor([0.3, 0.6])
    for value, count in ((first, one), (bad.t().contiguous().t(), 3), (last, two)):
        weights[0].grad = value
        weights[1].grad = None if value is first else value
        optimizer.accumulate(1.0, count)
    assert optimizer.step().dropped == 1
    wide = torch.promote_types(dtype, FP32)  # A sum of whole numbers is exact in it.
    first, last = first.to(wide), last.to(wide)
    expected = [-(first + 2 * last) / 3, -(2 * last) / 3]
    assert same_bits([optimizer.master_of(weight) for weight in weights], expected)
