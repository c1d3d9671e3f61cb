"""From scaled gradients to an update: unscaling, clipping and accumulation."""

from typing import Any

import pytest
import torch
from small_steps import gradients, parameters, set_gradients, sparse
from torch import Tensor, nn
from torch.optim import Optimizer
from vocabulary import same_bits

from mpframe import Backoff, MasterWeights, Static
from mpframe.core.optim import gradients as optim_gradients

FP32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
SGD, AdamW, SparseAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.SparseAdam


def spied(wrapped: MasterWeights) -> list[Tensor]:
    """What the wrapped optimizer is given, filled in at each of its steps."""
    given: list[Tensor] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        masters = [m for group in optimizer.param_groups for m in group["params"]]
        given[:] = [m.grad.clone() for m in masters if m.grad is not None]

    wrapped.register_step_pre_hook(look)
    return given


class TestUnscaling:
    """Seen on the gradients themselves: AdamW and clipping would hide a scale that was left in."""

    @pytest.fixture(autouse=True, params=["widened at once", "widened by buckets"])
    def _widened(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_gradients, "_FEW", 2**20 if request.param[-4:] == "once" else 0)

    @pytest.mark.parametrize(
        ("scale", "half"), [(2.0**8, FP32), (2.0**-3, HALF), (2.0**8, BFLOAT16)]
    )
    def test_the_optimizer_is_given_unscaled_gradients(
        self, scale: float, half: torch.dtype
    ) -> None:
        params = parameters(half)
        wrapped = MasterWeights(AdamW(params))
        exact = [g.to(half) for g in gradients(0, AdamW)]
        set_gradients(params, exact, scale)
        given = spied(wrapped)
        result = wrapped.step(Static(scale))
        assert same_bits(given, [g.float() for g in exact])
        assert result.amax.item() == max(g.abs().max().item() for g in exact)
        assert result.scale.item() == scale

    @pytest.mark.parametrize(
        ("accumulated", "half"), [(False, FP32), (False, HALF), (True, BFLOAT16)]
    )
    def test_values_are_clipped_once_they_are_unscaled(
        self, accumulated: bool, half: torch.dtype
    ) -> None:
        """0.3 is no number of either half format: the clamp comes after the cast to fp32."""
        params = parameters(half)
        wrapped = MasterWeights(AdamW(params))
        exact = [g.to(half) for g in gradients(0, AdamW)]
        set_gradients(params, exact, 2.0**4)
        given = spied(wrapped)
        if accumulated:
            wrapped.accumulate(2.0**4)
        result = wrapped.step(Static(2.0**4), max_value=0.3)
        assert same_bits(given, [g.float().clamp(-0.3, 0.3) for g in exact])
        assert result.amax.item() == max(g.abs().max().item() for g in exact) > 0.3

    def test_to_fp32_before_unscaling(self) -> None:
        """2^-14 / 2^14 = 2^-28 is 0 in float16."""
        weight = nn.Parameter(torch.zeros(1, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        weight.grad = torch.full((1,), 2.0**-14, dtype=HALF)
        wrapped.step(Static(2.0**14))
        assert wrapped.master_of(weight).item() == -(2.0**-28)

    def test_a_half_gradient_near_the_limit_does_not_overflow_the_norm(self) -> None:
        weight = nn.Parameter(torch.zeros(100, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=0.0))
        weight.grad = torch.full((100,), 60000.0, dtype=HALF)
        result = wrapped.step()
        assert not result.skipped
        assert result.grad_norm.item() == pytest.approx(6e5)

    def test_sparse_half_duplicates_are_summed_in_fp32(self) -> None:
        """64000 + 64000 is beyond float16, and both were finite."""
        weight = nn.Parameter(torch.zeros(2, 1, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=2.0**-10))
        values = torch.full((2, 1), 64000.0, dtype=HALF)
        weight.grad = sparse([1, 1], values, (2, 1))
        result = wrapped.step(Static(2.0))
        assert result.amax.item() == 64000.0
        assert wrapped.master_of(weight).flatten().tolist() == [0.0, -62.5]

    def test_sums_of_finite_gradients_are_no_overflow(self) -> None:
        """3e38 + 3e38 is inf; neither gradient is. Only a norm beyond fp32 cannot be clipped to."""
        weight = nn.Parameter(torch.zeros(2))
        wrapped = MasterWeights(SGD([weight], lr=1e-38))
        for clip in (1.0, None):
            weight.grad = torch.full((2,), 3e38)
            result = wrapped.step(max_norm=clip)
            assert bool(result.skipped) is bool(clip)
            assert bool(weight.any()) is not bool(clip)
        assert result.amax.item() == pytest.approx(3e38)


class TestAccumulation:
    """Several micro-batches to a step: the mean of the good ones, in fp32."""

    @pytest.mark.parametrize(
        ("dtype", "values"), [(FP32, (2.0, INF, 8.0, NAN)), (HALF, (INF, 2.0, NAN, 8.0))]
    )
    def test_a_dropped_micro_batch_does_not_count(
        self, dtype: torch.dtype, values: tuple[float, ...]
    ) -> None:
        weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        wrapped, scaler = MasterWeights(SGD([weight], lr=1.0)), Backoff(init_scale=4.0)
        amaxes = []
        for value in values:
            weight.grad = torch.full((1,), value, dtype=dtype)
            amaxes.append(wrapped.accumulate(scaler.scale).item())
            assert weight.grad is None
        result = wrapped.step(scaler)
        assert amaxes[values.index(2.0)] == 0.5
        assert not result.skipped
        assert result.dropped is not None
        assert result.dropped.item() == 2
        assert wrapped.master_of(weight).item() == -(2.0 + 8.0) / 4 / 2
        assert result.amax.item() == 1.25
        assert scaler.scale.item() == 2.0  # an overflow is an overflow, although the step goes on

    def test_a_window_of_bad_ones_is_skipped(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for _ in range(2):
            weight.grad = torch.full((1,), INF)
            wrapped.accumulate()
        result = wrapped.step()
        assert result.skipped
        assert weight.item() == 1.0
        weight.grad = torch.full((1,), 0.5)
        assert wrapped.step().dropped is None  # the window is closed
        assert weight.item() == 0.5

    def test_a_sum_beyond_fp32_is_skipped(self) -> None:
        """No micro-batch was dropped, and the scaler hears of none."""
        weight, seen = nn.Parameter(torch.ones(1)), []
        scaler: Any = Static(1.0)
        scaler.update = lambda amax: seen.append(amax.item())
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        value = torch.full((1,), 3e38)
        for _ in range(2):
            weight.grad = value.clone()
            wrapped.accumulate(scaler.scale)
        result = wrapped.step(scaler)
        assert (bool(result.skipped), int(result.dropped or 0)) == (True, 0)
        assert seen == [value.item()]
        assert weight.item() == 1.0

    def test_the_scaler_sees_the_largest_micro_batch(self) -> None:
        """Half must hold each micro-batch's gradients, not only their mean."""
        weight, seen = nn.Parameter(torch.zeros(1)), []
        scaler: Any = Static(1.0)
        scaler.update = lambda amax: seen.append(amax.item())
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for value in (8.0, -8.0, 1.0):
            weight.grad = torch.full((1,), value)
            wrapped.accumulate(scaler.scale)
        result = wrapped.step(scaler)
        assert seen == [8.0]
        assert result.amax.item() == pytest.approx(1 / 3)

    def test_small_terms_are_not_lost(self) -> None:
        """2048 + 1 = 2048 in float16. Gradients left at the step are the last micro-batch."""
        weight = nn.Parameter(torch.zeros(1, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for value in (2048.0, 1.0, 1.0):
            if weight.grad is not None:
                wrapped.accumulate()
            weight.grad = torch.full((1,), value, dtype=HALF)
        wrapped.step()
        assert wrapped.master_of(weight).item() == pytest.approx(-2050 / 3)

    @pytest.mark.parametrize("bad", [False, True])
    def test_sparse_gradients(self, bad: bool) -> None:
        weight = nn.Parameter(torch.zeros(3, 1, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for row, value in ((0, 2.0), (0, 4.0), (2, INF if bad else 0.0)):
            values = torch.full((1, 1), value, dtype=HALF)
            weight.grad = sparse([row], values, (3, 1))
            wrapped.accumulate()
        wrapped.step()
        expected = -6.0 / (2 if bad else 3)
        assert wrapped.master_of(weight).flatten().tolist() == [expected, 0.0, 0.0]

    def test_zero_grad_forgets_the_window(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        weight.grad = torch.ones(1)
        wrapped.accumulate()
        wrapped.zero_grad()
        assert wrapped.step().dropped is None
        assert weight.item() == 0.0
