"""A step is all or nothing: it skips without a trace, and consumes its gradients."""

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
    state_tensors,
    unchanged,
)
from torch import nn
from torch.optim import Optimizer
from vocabulary import same_bits

from mpframe import Backoff, LogMax, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError

FP32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
SGD, AdamW, SparseAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.SparseAdam


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

    def test_a_mask_adds_to_the_verdict(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        wrapped = MasterWeights(SGD([weight], lr=0.5))
        for gradient, masked in ((INF, False), (1.0, True), (1.0, False)):
            weight.grad = torch.full((1,), gradient)
            result = wrapped.step(skip_mask=torch.tensor(masked))
            assert bool(result.skipped) is (masked or gradient == INF)
        assert weight.item() == 0.5

    @pytest.mark.parametrize("way", ["load", "add"])
    @pytest.mark.usefixtures("waited_for")
    def test_the_first_step_with_new_state_is_skipped_by_the_host(self, way: str) -> None:
        params = parameters()
        wrapped = MasterWeights(SGD(params[:2], lr=0.05, momentum=0.9, fused=True))
        fresh = wrapped.state_dict()
        for gradient in (1.0, INF):
            set_gradients(params, [torch.full((3, 4), gradient)] * 3)
            wrapped.step()
            if gradient == 1.0 and way == "load":
                wrapped.load_state_dict(fresh)
            elif gradient == 1.0:
                wrapped.add_param_group({"params": params[2:]})
            assert bool(wrapped.skips_on_device) is False

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
