"""From gradients to an update: unscaling, accumulation, skips, and what is left afterwards."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_steps import (
    STEPPING,
    gradients,
    parameters,
    set_gradients,
    snapshot,
    sparse,
    state_tensors,
    unchanged,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from vocabulary import same_bits

from mpframe import Backoff, LogMax, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError
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


WAYS = [(0, FP32, INF, 1.0), (2, HALF, NAN, None), (2, BFLOAT16, -INF, None)]
SKIPS = [
    *((c, {}, *w) for c, w in zip(STEPPING, itertools.cycle(WAYS)) if c is not SparseAdam),
    *((SGD, {"fused": True, "momentum": 0.9}, *way) for way in WAYS),
    *((cls, {"fused": True}, *WAYS[0]) for cls in (torch.optim.Adam, torch.optim.Adagrad)),
    (AdamW, {"fused": True}, *WAYS[1]),
    (SGD, {}, *WAYS[1]),
    (SGD, {}, 0, FP32, NAN, None),
]


class TestSkip:
    """A step with a gradient that is not finite leaves every bit."""

    @pytest.mark.parametrize(("cls", "options", "steps_before", "dtype", "bad", "clip"), SKIPS)
    def test_leaves_every_bit(
        self,
        cls: type[Optimizer],
        options: dict[str, Any],
        steps_before: int,
        dtype: torch.dtype,
        bad: float,
        clip: float | None,
    ) -> None:
        params = parameters(dtype)
        wrapped = MasterWeights(cls(params, lr=0.05, **options))
        for step in range(steps_before):
            set_gradients(params, gradients(step, cls))
            wrapped.step()
        before = snapshot(wrapped, params)
        grads = gradients(9, cls)
        grads[1][0, 0] = bad
        set_gradients(params, grads)
        result = wrapped.step(max_norm=clip)
        assert result.skipped
        assert not torch.isfinite(result.amax)
        assert unchanged(before, wrapped, params)
        set_gradients(params, gradients(10, cls))
        assert not wrapped.step().skipped
        assert not unchanged(before, wrapped, params)

    @pytest.mark.parametrize(
        ("cls", "waits"), [(SGD, False), (SGD, True), (AdamW, True), (torch.optim.Adagrad, True)]
    )
    def test_after_a_skip_the_next_steps_are_as_if_it_had_not_been(
        self, cls: type[Optimizer], waits: bool, request: pytest.FixtureRequest
    ) -> None:
        """Also where the fused kernel takes the verdict, and where the first step is skipped."""
        if waits:
            request.getfixturevalue("waited_for")
        options = {"momentum": 0.9} if cls is SGD else {}
        runs = []
        for skips in ((0, 3), ()):
            params = parameters()
            wrapped = MasterWeights(cls(params, lr=0.05, fused=True, **options))
            for step in range(6):
                if step in skips:
                    set_gradients(params, [g * INF for g in gradients(step, cls)])
                    wrapped.step()
                set_gradients(params, gradients(step, cls))
                wrapped.step()
            assert wrapped.skips_on_device == waits
            runs.append([*params, *state_tensors(wrapped.optimizer)])
        assert same_bits(*runs)

    @pytest.mark.parametrize("make", [Static, LogMax])
    def test_the_scaler_hears_of_every_step_once(self, make: Callable[[], Any]) -> None:
        params, scaler, seen = parameters(HALF), make(), []
        update = scaler.update
        scaler.update = lambda amax: (seen.append(amax.item()), update(amax))
        wrapped = MasterWeights(SGD(params, lr=0.1))
        used = scaler.scale.item()
        for factor in (1.0, INF):
            set_gradients(params, [torch.ones(3, 4) * factor] * 3)
            result = wrapped.step(scaler)
        assert seen == [1 / used, INF]
        assert result.skipped


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


class TestConsumed:
    """A step consumes the gradients, whatever came of it."""

    @pytest.mark.parametrize(
        ("dtype", "keep", "way", "kind"),
        [
            (FP32, True, "step", "dense"),
            (HALF, True, "skip", "dense"),
            (HALF, False, "accumulate", "dense"),
            (HALF, True, "skip_mask", "sparse"),
            (FP32, True, "device", "dense"),
            (HALF, True, "accumulate", "sparse"),
            (HALF, False, "step", "sparse"),
        ],
    )
    def test_no_gradient_is_left(self, dtype: torch.dtype, keep: bool, way: str, kind: str) -> None:
        fused = way == "device" and kind == "dense"
        params = parameters(dtype)
        wrapped = MasterWeights(SGD(params, lr=0.1, fused=fused), keep_masters=keep)
        cls = SparseAdam if kind == "sparse" else SGD
        for step in range(2):
            set_gradients(params, [g.half().float() for g in gradients(step, cls)])
            if way == "skip":
                params[0].grad = params[0].grad * INF  # type: ignore[operator]
            if way == "accumulate":
                wrapped.accumulate()
                set_gradients(params, gradients(step, cls))
            skip_mask = torch.tensor(True) if way == "skip_mask" else None
            wrapped.step(skip_mask=skip_mask)
            assert [p.grad for p in params] == [None] * 3
            assert [wrapped.master_of(p).grad for p in params] == [None] * 3

    def test_a_second_step_is_refused(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(SGD(params, lr=0.1))
        for factor in (1.0, INF):
            set_gradients(params, [g * factor for g in gradients(0, SGD)])
            wrapped.step()
            before = snapshot(wrapped, params)
            for _ in range(2):
                with pytest.raises(ConfigError) as error:
                    wrapped.step(Backoff(), max_norm=1.0)
            assert unchanged(before, wrapped, params)
        assert str(error.value) == (
            "optimizer.step: the step before has consumed the gradients and no backward pass has "
            "left new ones; call backward, or zero_grad where a step without gradients is meant"
        )

    @pytest.mark.parametrize("between", ["zero_grad", "accumulate", "gradients", "of a master"])
    def test_a_second_step_after(self, between: str) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(SGD(params, lr=0.1))
        set_gradients(params, gradients(0, SGD))
        wrapped.step()
        if between == "gradients":
            set_gradients(params, gradients(0, SGD))
        elif between == "of a master":
            wrapped.master_of(params[0]).square().sum().backward()  # type: ignore[no-untyped-call]
        else:
            getattr(wrapped, between)()
        wrapped.step()

    def test_an_accumulated_mean_is_not_absorbed_by_the_next_window(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for expected in (-1.0, -2.0):
            for _ in range(2):
                weight.grad = torch.ones(1) if weight.grad is None else weight.grad + 1
                wrapped.accumulate()
            wrapped.step()
            assert weight.item() == expected

    @pytest.mark.parametrize(
        ("mode", "clear"), [("fp32", "model"), ("amp", "none"), ("mixed", "nothing")]
    )
    def test_no_gradient_is_applied_twice(self, mode: str, clear: str) -> None:
        """A layer frozen in mid-run stays where it is, however gradients are cleared."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        precision = Precision(mode)
        model, wrapped = precision.prepare(model, SGD(model.parameters(), lr=0.1))

        def step() -> None:
            if clear == "model":
                model.zero_grad()
            elif clear == "none":
                for parameter in model.parameters():
                    parameter.grad = None
            with precision.cast():
                loss = nn.functional.mse_loss(model(torch.ones(2, 4)).float(), torch.ones(2, 4))
            loss.backward()
            wrapped.step()

        step()
        model[0].requires_grad_(False)
        frozen, trained = model[0].weight.clone(), model[2].weight.clone()
        step()
        assert torch.equal(model[0].weight, frozen)
        assert not torch.equal(model[2].weight, trained)
