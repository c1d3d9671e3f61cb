"""fp32 masters around every optimizer of torch: exactness, what a skip leaves, what is refused."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from vocabulary import HALVES, formats, same_bits, tensors

from mpframe import Backoff, LogMax, MasterWeights, Precision, Static
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.optim import gradients as optim_gradients
from mpframe.tracking.dtype_map import dtype_map
from mpframe.training.callbacks.guards import saturation_warning
from mpframe.training.optimizers.lbfgs import step_with_closure
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan

FP32, HALF = torch.float32, torch.float16
INF = float("inf")


def all_optimizers() -> Iterator[type[Optimizer]]:
    for cls in vars(torch.optim).values():
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            yield cls


OPTIMIZERS = sorted(all_optimizers(), key=lambda cls: cls.__name__)
CLOSURES = [torch.optim.LBFGS]
STEPPING = [cls for cls in OPTIMIZERS if cls not in CLOSURES]


def parameters(dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype)) for _ in range(3)]


def gradients(step: int, cls: type[Optimizer]) -> list[Tensor]:
    """Random gradients of one step; sparse ones for the optimizer that takes no others."""
    generator = torch.Generator().manual_seed(100 + step)
    dense = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    return [g.to_sparse(1) for g in dense] if cls is torch.optim.SparseAdam else dense


def sparse(rows: list[int], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


def set_gradients(params: list[Any], grads: list[Tensor], scale: float = 1.0) -> None:
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = (gradient * scale).to(parameter.dtype)


def spied(wrapped: MasterWeights) -> list[Tensor]:
    """What the wrapped optimizer is given, filled in at each of its steps."""
    given: list[Tensor] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        masters = [m for group in optimizer.param_groups for m in group["params"]]
        given[:] = [m.grad.clone() for m in masters if m.grad is not None]

    wrapped.register_step_pre_hook(look)
    return given


def state_tensors(optimizer: Any) -> list[Tensor]:
    return tensors([list(state.values()) for state in optimizer.state.values()])


def quadratic(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        for parameter in params:
            parameter.grad = None
        loss = torch.stack([(p - 1).square().sum() for p in params]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def test_torch_optim_was_walked() -> None:
    assert {torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon, torch.optim.LBFGS} <= {
        *OPTIMIZERS
    }
    assert len(OPTIMIZERS) >= 15


class TestFp32:
    """Over fp32 parameters the wrapper is invisible."""

    @pytest.mark.parametrize("scale", [None, 2.0**10, 2.0**-9, 1.0])
    @pytest.mark.parametrize("cls", STEPPING)
    def test_equals_the_plain_optimizer_bit_for_bit(
        self, cls: type[Optimizer], scale: float | None
    ) -> None:
        """Also under a power-of-two scale: it moves exponents, no other bit."""
        plain_params, params = parameters(), parameters()
        plain, wrapped = cls(plain_params, lr=0.05), MasterWeights(cls(params, lr=0.05))
        scaler = None if scale is None else Static(scale)
        for step in range(5):
            set_gradients(plain_params, gradients(step, cls))
            plain.step()
            set_gradients(params, gradients(step, cls), scale or 1.0)
            wrapped.step(scaler)
            assert same_bits(params, plain_params)
        assert same_bits(state_tensors(wrapped.optimizer), state_tensors(plain))

    @pytest.mark.parametrize("cls", CLOSURES)
    def test_equals_the_plain_optimizer_with_a_closure(self, cls: type[Optimizer]) -> None:
        plain_params, params = parameters(), parameters()
        plain, wrapped = cls(plain_params, lr=0.5), MasterWeights(cls(params, lr=0.5))
        for _ in range(3):
            loss = plain.step(quadratic(plain_params))
            result = step_with_closure(wrapped, quadratic(params))
            assert torch.equal(result.loss, loss)  # type: ignore[arg-type]
        assert same_bits(params, plain_params)

    def test_an_fp32_parameter_is_its_own_master(self) -> None:
        params = parameters()
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        assert all(wrapped.master_of(p) is p for p in params)
        assert wrapped.param_groups[0]["params"] == params

    @pytest.mark.parametrize("max_norm", [0.1, 1e9])
    def test_clipping_is_torchs(self, max_norm: float) -> None:
        plain_params, params = parameters(), parameters()
        plain = torch.optim.SGD(plain_params, lr=0.1)
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        set_gradients(plain_params, gradients(0, torch.optim.SGD))
        set_gradients(params, gradients(0, torch.optim.SGD))
        norm = nn.utils.clip_grad_norm_(plain_params, max_norm)
        plain.step()
        result = wrapped.step(max_norm=max_norm)
        assert torch.equal(result.grad_norm, norm)
        assert same_bits(params, plain_params)

    @pytest.mark.parametrize("max_value", [0.1, 1e9])
    @pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
    def test_clipping_by_value_is_torchs(self, cls: type[Optimizer], max_value: float) -> None:
        plain_params, params = parameters(), parameters()
        plain, wrapped = cls(plain_params, lr=0.1), MasterWeights(cls(params, lr=0.1))
        for step in range(3):
            set_gradients(plain_params, gradients(step, cls))
            set_gradients(params, gradients(step, cls), 2.0**7)
            norm = nn.utils.get_total_norm([p.grad for p in plain_params])
            nn.utils.clip_grad_value_(plain_params, max_value)
            plain.step()
            result = wrapped.step(Static(2.0**7), max_value=max_value)
            assert torch.equal(result.grad_norm, norm)
            assert same_bits(params, plain_params)

    def test_float64_parameters_stay_float64(self) -> None:
        plain_params, params = parameters(torch.float64), parameters(torch.float64)
        plain = torch.optim.AdamW(plain_params)
        wrapped = MasterWeights(torch.optim.AdamW(params))
        set_gradients(plain_params, gradients(0, torch.optim.AdamW))
        set_gradients(params, gradients(0, torch.optim.AdamW), 8.0)
        plain.step()
        wrapped.step(Static(8.0))
        assert same_bits(params, plain_params)

    def test_parameters_of_several_formats(self) -> None:
        params = [parameters(d)[0] for d in (FP32, HALF, torch.bfloat16, torch.float64)]
        wrapped = MasterWeights(torch.optim.SGD(params, lr=1.0))
        set_gradients(params, [torch.ones(3, 4)] * 4, 4.0)
        before = [wrapped.master_of(p).detach().clone() for p in params]
        result = wrapped.step(Static(4.0))
        assert result.amax.item() == 1.0
        assert result.amax.dtype == FP32
        assert result.grad_norm.item() == pytest.approx(48**0.5)
        after = [wrapped.master_of(p).detach() for p in params]
        assert same_bits(after, [b - 1 for b in before])


class TestHalf:
    """Half parameters: the update acts on fp32 masters."""

    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("cls", STEPPING)
    def test_masters_are_what_the_plain_optimizer_makes_in_fp32(
        self, cls: type[Optimizer], half: str
    ) -> None:
        """Given the same (half) gradients, masters are the fp32 weights; the weights round them."""
        plain_params, params = parameters(), parameters()
        masters = {p: p.detach().clone() for p in params}
        for p in params:
            p.data = p.data.to(HALVES[half])
        plain, wrapped = cls(plain_params, lr=0.05), MasterWeights(cls(params, lr=0.05), masters)
        for step in range(3):
            rounded = [g.to(HALVES[half]) for g in gradients(step, cls)]
            set_gradients(plain_params, [g.float() for g in rounded])
            set_gradients(params, rounded)
            plain.step()
            wrapped.step()
            assert same_bits([wrapped.master_of(p) for p in params], plain_params)
            assert same_bits(params, [p.to(HALVES[half]) for p in plain_params])
        assert formats(state_tensors(wrapped.optimizer)) <= {FP32}
        assert same_bits(state_tensors(wrapped.optimizer), state_tensors(plain))

    @pytest.mark.parametrize(("keep", "expected"), [(True, 1 + 2.0**-7), (False, 1.0)])
    def test_32_updates_of_2_to_the_minus_12_move_a_bfloat16_weight(
        self, keep: bool, expected: float
    ) -> None:
        """2^-7 is one unit in the last place of a bfloat16 at 1; each update is a 32nd of it."""
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=2.0**-12), keep_masters=keep)
        for _ in range(32):
            weight.grad = -torch.ones(1, dtype=torch.bfloat16)
            wrapped.step()
        assert weight.item() == expected

    def test_weight_decay_acts_on_masters(self) -> None:
        """1e-4 * 1e-4 = 1e-8, which is 0 in float16."""
        weight = nn.Parameter(torch.full((1,), 1e-4, dtype=HALF))
        wrapped = MasterWeights(
            torch.optim.SGD([weight], lr=1.0, weight_decay=1e-4), {weight: torch.full((1,), 1e-4)}
        )
        weight.grad = torch.zeros(1, dtype=HALF)
        wrapped.step()
        moved = 1e-4 - wrapped.master_of(weight).item()
        # The difference of two fp32 numbers near 1e-4, whose last place is 2^-37.
        assert abs(moved - 1e-8) <= 2.0**-37

    def test_masters_start_from_before_the_rounding(self) -> None:
        model = nn.Linear(4, 4)
        before = model.weight.detach().clone()
        precision = Precision("mixed")
        model, wrapped = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.weight.dtype == HALF
        assert same_bits([wrapped.master_of(model.weight)], [before])
        assert not torch.equal(before, before.half().float())

    def test_without_masters_state_and_update_are_half(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1, momentum=0.9), keep_masters=False)
        set_gradients(params, gradients(0, torch.optim.SGD), 1024.0)
        wrapped.step(Static(1024.0))
        assert all(wrapped.master_of(p) is p for p in params)
        assert formats(state_tensors(wrapped.optimizer)) == {HALF}

    def test_a_half_parameter_on_arrival_starts_from_its_half_value(self) -> None:
        model = nn.Linear(4, 4).half()
        before = model.weight.detach().clone()
        model, wrapped = Precision("mixed").prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        assert same_bits([model.weight, wrapped.master_of(model.weight)], [before, before.float()])

    def test_state_made_before_wrapping_is_widened(self) -> None:
        params = parameters(HALF)
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        set_gradients(params, gradients(0, torch.optim.SGD))
        optimizer.step()
        MasterWeights(optimizer)
        assert formats(state_tensors(optimizer)) == {FP32}


class TestUnscaling:
    """Seen on the gradients themselves: AdamW and clipping would hide a scale that was left in."""

    @pytest.fixture(autouse=True, params=["widened at once", "widened by buckets"])
    def _widened(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optim_gradients, "_FEW", 2**20 if request.param[-4:] == "once" else 0)

    @pytest.mark.parametrize("half", [FP32, *HALVES.values()])
    @pytest.mark.parametrize("scale", [2.0**8, 2.0**-3])
    def test_the_optimizer_is_given_unscaled_gradients(
        self, scale: float, half: torch.dtype
    ) -> None:
        params = parameters(half)
        wrapped = MasterWeights(torch.optim.AdamW(params))
        exact = [g.to(half) for g in gradients(0, torch.optim.AdamW)]
        set_gradients(params, exact, scale)
        given = spied(wrapped)
        result = wrapped.step(Static(scale))
        assert same_bits(given, [g.float() for g in exact])
        assert result.amax.item() == max(g.abs().max().item() for g in exact)
        assert result.scale.item() == scale

    @pytest.mark.parametrize("half", [FP32, *HALVES.values()])
    @pytest.mark.parametrize("accumulated", [False, True])
    def test_values_are_clipped_once_they_are_unscaled(
        self, accumulated: bool, half: torch.dtype
    ) -> None:
        """0.3 is no number of either half format: the clamp comes after the cast to fp32."""
        params = parameters(half)
        wrapped = MasterWeights(torch.optim.AdamW(params))
        exact = [g.to(half) for g in gradients(0, torch.optim.AdamW)]
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
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.full((1,), 2.0**-14, dtype=HALF)
        wrapped.step(Static(2.0**14))
        assert wrapped.master_of(weight).item() == -(2.0**-28)

    def test_a_half_gradient_near_the_limit_does_not_overflow_the_norm(self) -> None:
        weight = nn.Parameter(torch.zeros(100, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=0.0))
        weight.grad = torch.full((100,), 60000.0, dtype=HALF)
        result = wrapped.step()
        assert not result.skipped
        assert result.grad_norm.item() == pytest.approx(6e5)

    def test_sparse_half_duplicates_are_summed_in_fp32(self) -> None:
        """64000 + 64000 is beyond float16, and both were finite."""
        weight = nn.Parameter(torch.zeros(2, 1, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=2.0**-10))
        values = torch.full((2, 1), 64000.0, dtype=HALF)
        weight.grad = sparse([1, 1], values, (2, 1))
        result = wrapped.step(Static(2.0))
        assert result.amax.item() == 64000.0
        assert wrapped.master_of(weight).flatten().tolist() == [0.0, -62.5]

    def test_sums_of_finite_gradients_are_no_overflow(self) -> None:
        """3e38 + 3e38 is inf; neither gradient is."""
        weight = nn.Parameter(torch.zeros(2))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1e-38))
        weight.grad = torch.full((2,), 3e38)
        result = wrapped.step()
        assert not result.skipped
        assert result.amax.item() == pytest.approx(3e38)

    def test_clipping_to_a_norm_beyond_fp32_skips(self) -> None:
        weight = nn.Parameter(torch.zeros(2))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.full((2,), 3e38)
        assert wrapped.step(max_norm=1.0).skipped
        assert weight.tolist() == [0.0, 0.0]


def snapshot(wrapped: MasterWeights, params: list[nn.Parameter]) -> Any:
    masters = [wrapped.master_of(p) for p in params]
    return copy.deepcopy(
        (
            [p.detach() for p in params],
            [m.detach() for m in masters],
            wrapped.optimizer.state_dict(),
        )
    )


def unchanged(before: Any, wrapped: MasterWeights, params: list[nn.Parameter]) -> bool:
    after = snapshot(wrapped, params)
    plain = before[2]["param_groups"] == after[2]["param_groups"]
    return plain and same_bits(tensors(before), tensors(after))


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


class TestSkip:
    """A step with a gradient that is not finite leaves every bit."""

    @pytest.mark.parametrize("dtype", [FP32, *HALVES.values()])
    def test_nan_skips_without_clipping(self, dtype: torch.dtype) -> None:
        weight = nn.Parameter(torch.ones(2, dtype=dtype))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=0.5))
        weight.grad = torch.tensor([1.0, float("nan")], dtype=dtype)
        assert wrapped.step().skipped
        assert torch.equal(weight.detach(), torch.ones(2, dtype=dtype))

    @pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
    @pytest.mark.parametrize("dtype", [FP32, *HALVES.values()])
    @pytest.mark.parametrize("steps_before", [0, 2])
    @pytest.mark.parametrize(
        ("cls", "options"),
        [
            *((cls, {}) for cls in STEPPING if cls is not torch.optim.SparseAdam),
            *((cls, {"fused": True}) for cls in FUSED),
            (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
            (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        ],
    )
    def test_leaves_every_bit(
        self,
        cls: type[Optimizer],
        options: dict[str, Any],
        steps_before: int,
        dtype: torch.dtype,
        bad: float,
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
        result = wrapped.step(max_norm=1.0)
        assert result.skipped
        assert not torch.isfinite(result.amax)
        assert unchanged(before, wrapped, params)
        set_gradients(params, gradients(10, cls))
        assert not wrapped.step().skipped
        assert not unchanged(before, wrapped, params)

    @pytest.mark.parametrize("waits", [False, True])
    @pytest.mark.parametrize("cls", FUSED)
    def test_after_a_skip_the_next_steps_are_as_if_it_had_not_been(
        self, cls: type[Optimizer], waits: bool, request: pytest.FixtureRequest
    ) -> None:
        """Also where the fused kernel takes the verdict, and where the first step is skipped."""
        if waits:
            request.getfixturevalue("waited_for")
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
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

    @pytest.mark.parametrize("make", [Static, Backoff, LogMax])
    def test_the_scaler_hears_of_every_step_once(self, make: Callable[[], Any]) -> None:
        params, scaler, seen = parameters(HALF), make(), []
        update = scaler.update
        scaler.update = lambda amax: (seen.append(amax.item()), update(amax))
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        used = scaler.scale.item()
        for factor in (1.0, INF):
            set_gradients(params, [torch.ones(3, 4) * factor] * 3)
            result = wrapped.step(scaler)
        assert seen == [1 / used, INF]
        assert result.skipped


class TestAccumulation:
    """Several micro-batches to a step: the mean of the good ones, in fp32."""

    @pytest.mark.parametrize("dtype", [FP32, HALF])
    @pytest.mark.parametrize("values", [(2.0, INF, 8.0, math.nan), (INF, 2.0, math.nan, 8.0)])
    def test_a_dropped_micro_batch_does_not_count(
        self, dtype: torch.dtype, values: tuple[float, ...]
    ) -> None:
        weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        wrapped, scaler = MasterWeights(torch.optim.SGD([weight], lr=1.0)), Backoff(init_scale=4.0)
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
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
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
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
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
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for value in (8.0, -8.0, 1.0):
            weight.grad = torch.full((1,), value)
            wrapped.accumulate(scaler.scale)
        result = wrapped.step(scaler)
        assert seen == [8.0]
        assert result.amax.item() == pytest.approx(1 / 3)

    def test_gradients_left_at_the_step_are_the_last_micro_batch(self) -> None:
        weight = nn.Parameter(torch.zeros(1, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.ones(1, dtype=HALF)
        wrapped.accumulate()
        weight.grad = torch.full((1,), 3.0, dtype=HALF)
        wrapped.step()
        assert wrapped.master_of(weight).item() == -2.0

    def test_small_terms_are_not_lost(self) -> None:
        """2048 + 1 = 2048 in float16."""
        weight = nn.Parameter(torch.zeros(1, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for value in (2048.0, 1.0, 1.0):
            weight.grad = torch.full((1,), value, dtype=HALF)
            wrapped.accumulate()
        wrapped.step()
        assert wrapped.master_of(weight).item() == pytest.approx(-2050 / 3)

    @pytest.mark.parametrize("bad", [False, True])
    def test_sparse_gradients(self, bad: bool) -> None:
        weight = nn.Parameter(torch.zeros(3, 1, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for row, value in ((0, 2.0), (0, 4.0), (2, INF if bad else 0.0)):
            values = torch.full((1, 1), value, dtype=HALF)
            weight.grad = sparse([row], values, (3, 1))
            wrapped.accumulate()
        wrapped.step()
        expected = -6.0 / (2 if bad else 3)
        assert wrapped.master_of(weight).flatten().tolist() == [expected, 0.0, 0.0]

    def test_zero_grad_forgets_the_window(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.ones(1)
        wrapped.accumulate()
        wrapped.zero_grad()
        assert wrapped.step().dropped is None
        assert weight.item() == 0.0


class TestParameters:
    """Kinds of parameters a model can have."""

    def test_no_gradients_at_all(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(torch.optim.AdamW(params, weight_decay=0.5))
        before = snapshot(wrapped, params)
        result = wrapped.step(Backoff(), max_norm=1.0)
        assert (result.amax.item(), result.grad_norm.item(), bool(result.skipped)) == (0, 0, False)
        assert unchanged(before, wrapped, params)

    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
    @pytest.mark.parametrize("dtype", [FP32, HALF])
    def test_frozen_unused_and_empty(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        used, unused, frozen = parameters(dtype)
        frozen.requires_grad_(False)
        empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        params = [used, unused, frozen, empty]
        wrapped = MasterWeights(torch.optim.AdamW(params, lr=0.1, **options))
        before = [wrapped.master_of(p).detach().clone() for p in params]
        for _ in range(2):
            used.grad, empty.grad = torch.ones_like(used), torch.zeros_like(empty)
            result = wrapped.step(Static(2.0), max_norm=1e3)
        assert result.amax.item() == 0.5
        after = [wrapped.master_of(p) for p in params]
        assert not torch.equal(after[0], before[0])
        assert same_bits(after[1:], before[1:])
        assert wrapped.master_of(frozen).requires_grad is False

    def test_only_empty_parameters(self) -> None:
        empty = nn.Parameter(torch.zeros(0))
        wrapped = MasterWeights(torch.optim.SGD([empty], lr=0.1))
        empty.grad = torch.zeros(0)
        assert wrapped.step(Static(2.0), max_norm=1.0).amax.item() == 0

    def test_no_parameters_in_a_group(self) -> None:
        optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
        assert MasterWeights(optimizer).step().amax.item() == 0

    def test_tied_weights_have_one_master(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model, wrapped = Precision("mixed").prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        assert len(wrapped.param_groups[0]["params"]) == 3
        with Precision("mixed").cast():
            model(torch.ones(1, 3)).sum().backward()
        wrapped.step()
        assert same_bits([model[1].weight], [wrapped.master_of(model[0].weight).half()])
        names = wrapped.masters_by_name(model)
        assert names["0.weight"].data_ptr() == names["1.weight"].data_ptr()

    def test_a_tied_weight_takes_the_widest_format_wanted(self) -> None:
        """An embedding keeps fp32 weights; the head that shares them casts them when it runs."""
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        model["head"].weight = model["embed"].weight
        precision = Precision("mixed")
        rows = {row.module: row.storage for row in dtype_map(precision, model)}
        precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model["head"].weight.dtype == FP32
        assert model["head"].bias.dtype == HALF
        assert rows == {"embed": FP32, "head": FP32}
        with precision.cast():
            assert model["head"](model["embed"](torch.tensor([1]))).dtype == HALF

    def test_several_groups_keep_their_options(self) -> None:
        a, b, _ = parameters(HALF)
        groups = [{"params": [a], "lr": 0.0}, {"params": [b], "lr": 1.0}]
        wrapped = MasterWeights(torch.optim.SGD(groups, lr=0.5))
        set_gradients([a, b], [torch.ones(3, 4)] * 2)
        before = snapshot(wrapped, [a, b])
        wrapped.step()
        assert same_bits([a, b], [before[0][0], (before[1][1] - 1).half()])

    def test_groups_added_later_start_from_before_the_rounding(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first = model[0].weight.detach().clone()
        model, wrapped = Precision("mixed").prepare(
            model, torch.optim.SGD(model[1].parameters(), 0.1)
        )
        wrapped.add_param_group({"params": list(model[0].parameters()), "lr": 1.0})
        assert same_bits([wrapped.master_of(model[0].weight)], [first])
        model[0].weight.grad = torch.ones(4, 4, dtype=HALF)
        wrapped.step()
        assert same_bits([wrapped.master_of(model[0].weight)], [first - 1])

    def test_two_optimizers_share_a_model(self) -> None:
        model = nn.Linear(4, 4)
        before = [p.detach().clone() for p in model.parameters()]
        precision = Precision("mixed")
        _, first = precision.prepare(model, torch.optim.SGD([model.weight], lr=0.1))
        _, second = precision.prepare(model, torch.optim.SGD([model.bias], lr=0.1))
        masters = [first.master_of(model.weight), second.master_of(model.bias)]
        assert same_bits(masters, before)

    def test_zero_grad_without_none(self) -> None:
        params = [*parameters(HALF), *parameters()]
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, gradients(0, torch.optim.SGD) * 2)
        wrapped.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in params)


class TestConsumed:
    """A step consumes the gradients, whatever came of it."""

    @pytest.mark.parametrize("kind", ["dense", "sparse"])
    @pytest.mark.parametrize("way", ["step", "skip", "accumulate", "skip_mask", "device"])
    @pytest.mark.parametrize(("dtype", "keep"), [(FP32, True), (HALF, True), (HALF, False)])
    def test_no_gradient_is_left(self, dtype: torch.dtype, keep: bool, way: str, kind: str) -> None:
        fused = way == "device" and kind == "dense"
        params = parameters(dtype)
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1, fused=fused), keep_masters=keep)
        cls = torch.optim.SparseAdam if kind == "sparse" else torch.optim.SGD
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

    @pytest.mark.parametrize("dtype", [FP32, HALF])
    def test_a_second_step_is_refused(self, dtype: torch.dtype) -> None:
        params = parameters(dtype)
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        for factor in (1.0, INF):
            set_gradients(params, [g * factor for g in gradients(0, torch.optim.SGD)])
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
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.1))
        set_gradients(params, gradients(0, torch.optim.SGD))
        wrapped.step()
        if between == "zero_grad":
            wrapped.zero_grad()
        elif between == "accumulate":
            wrapped.accumulate()
        elif between == "gradients":
            set_gradients(params, gradients(0, torch.optim.SGD))
        else:
            master = wrapped.master_of(params[0])
            master.square().sum().backward()  # type: ignore[no-untyped-call]
        wrapped.step()

    def test_steps_without_any_gradient_go_on(self) -> None:
        wrapped = MasterWeights(torch.optim.SGD(parameters(), lr=0.1))
        for _ in range(2):
            assert wrapped.step().amax.item() == 0

    def test_an_accumulated_mean_is_not_absorbed_by_the_next_window(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for expected in (-1.0, -2.0):
            for _ in range(2):
                weight.grad = torch.ones(1) if weight.grad is None else weight.grad + 1
                wrapped.accumulate()
            wrapped.step()
            assert weight.item() == expected

    @pytest.mark.parametrize("clear", ["model", "none", "nothing"])
    @pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
    def test_no_gradient_is_applied_twice(self, mode: str, clear: str) -> None:
        """A layer frozen in mid-run stays where it is, however gradients are cleared."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        precision = Precision(mode)
        model, wrapped = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

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

    def test_of_a_closure(self) -> None:
        params = parameters()
        wrapped = MasterWeights(torch.optim.LBFGS(params, lr=0.5))
        for _ in range(2):
            step_with_closure(wrapped, quadratic(params))
            assert [p.grad for p in params] == [None] * 3


class TestGroups:
    """The groups show the model's own parameters; gradients left at masters count."""

    @pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
    def test_their_parameters_are_the_models(self, mode: str) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [{"params": list(layer.parameters())} for layer in model]
        model, wrapped = Precision(mode).prepare(model, torch.optim.SGD(groups, lr=0.1))
        shown = [p for group in wrapped.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(shown, model.parameters(), strict=True))

    def test_all_else_is_shared(self) -> None:
        wrapped = MasterWeights(torch.optim.SGD(parameters(HALF), lr=0.1, momentum=0.9))
        (group,), (inner,) = wrapped.param_groups, wrapped.optimizer.param_groups
        assert {**group, "params": None} == {**inner, "params": None}
        group["lr"] = 0.5
        assert inner["lr"] == 0.5
        inner["lr"] = 0.25
        assert group["lr"] == 0.25
        assert group.setdefault("more", 1) == inner.pop("more") == 1
        assert len(group) == len(inner)
        inner["mine"] = 1
        del group["mine"]
        assert "mine" not in inner
        for change in (lambda: group.update(params=[]), lambda: group.pop("params")):
            with pytest.raises(ConfigError) as error:
                change()
        assert str(error.value) == (
            "optimizer.param_groups: params stay as they are; add some with add_param_group, or "
            "make a new optimizer"
        )

    def test_state_and_defaults_are_the_wrapped_ones(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(torch.optim.AdamW(params, lr=0.1))
        assert wrapped.defaults is wrapped.optimizer.defaults
        set_gradients(params, gradients(0, torch.optim.AdamW))
        wrapped.step()
        for parameter in params:
            inner = wrapped.optimizer.state[wrapped.master_of(parameter)]
            assert wrapped.state[parameter] is inner

    @pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
    def test_clipping_over_the_groups_acts(self, mode: str) -> None:
        model = nn.Linear(4, 4)
        model, wrapped = Precision(mode).prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        listed = [p for group in wrapped.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(listed, 0.5)
        # 20 gradients of 1, of norm 4.5, to 0.5: halves hold each to 2^-11 of its size.
        assert wrapped.step().grad_norm.item() == pytest.approx(0.5, rel=2.0**-10)

    @pytest.mark.whole_masters
    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize("way", ["step", "accumulate"])
    def test_a_penalty_on_masters_counts(self, way: str, half: str) -> None:
        """As scaled as the loss, and added in fp32: 2^-13 beside 1 is nothing in half."""
        weight = nn.Parameter(torch.zeros(2, dtype=HALVES[half]))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        for total in (1 + 2.0**-13, 2 + 2.0**-12):
            weight.grad = torch.full_like(weight, 4.0)
            (wrapped.master_of(weight).sum() * 2.0**-11).backward()
            if way == "accumulate":
                wrapped.accumulate(4.0)
            result = wrapped.step(Static(4.0))
            assert result.amax.item() == 1 + 2.0**-13
            assert wrapped.master_of(weight).tolist() == [-total, -total]

    def test_a_penalty_alone_counts(self) -> None:
        weight = nn.Parameter(torch.zeros(2, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        wrapped.master_of(weight).sum().backward()  # type: ignore[no-untyped-call]
        assert not wrapped.step().skipped
        assert wrapped.master_of(weight).tolist() == [-1.0, -1.0]

    @pytest.mark.parametrize("sparse_one", ["weight", "master", "both"])
    def test_a_penalty_beside_sparse_gradients(self, sparse_one: str) -> None:
        weight = nn.Parameter(torch.zeros(2, 1, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0))
        row = sparse([0], torch.ones(1, 1), (2, 1))
        weight.grad = row.half() if sparse_one != "master" else row.to_dense().half()
        wrapped.master_of(weight).grad = row if sparse_one != "weight" else row.to_dense()
        wrapped.step()
        assert wrapped.master_of(weight).flatten().tolist() == [-2.0, 0.0]


class TestSaturation:
    """A weight beyond the half range is held at its end, counted and warned about."""

    def test_never_inf(self) -> None:
        model = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1e5, -1e9], [65504.0, 1.0]]))
        precision = Precision("mixed")
        model, wrapped = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert model.weight.flatten().tolist() == [65504.0, -65504.0, 65504.0, 1.0]
        model.weight.grad = torch.tensor([[0.0, 0.0], [-60000.0, 0.0]], dtype=HALF)
        wrapped.step()
        assert model.weight.flatten().tolist() == [65504.0, -65504.0, 65504.0, 1.0]
        master = wrapped.master_of(model.weight).flatten().tolist()
        assert master == [1e5, -1e9, 65504.0 + 60000.0, 1.0]
        assert saturation_warning(wrapped, model) == (
            "3 weights lie beyond the half range and are held at its end (weight); their masters "
            "go on: lower optimizer.lr, use dtype.half=bfloat16, or pin the module with "
            "ops.modules=...:fp32"
        )

    def test_the_layers_with_most_of_them_come_first(self) -> None:
        model = nn.Sequential(*(nn.Linear(4, 1, bias=False) for _ in range(4)))
        with torch.no_grad():
            for count, layer in enumerate(model, start=1):
                layer.weight[0, :count] = 1e5
        _, wrapped = Precision("mixed").prepare(model, torch.optim.SGD(model.parameters()))
        said = saturation_warning(wrapped, model)
        assert said is not None
        assert "10 weights" in said
        assert "(3.weight, 2.weight, 1.weight, ...)" in said

    def test_silent_otherwise(self) -> None:
        for mode in ("fp32", "mixed", "amp"):
            model = nn.Linear(2, 2)
            model, wrapped = Precision(mode).prepare(model, torch.optim.SGD(model.parameters()))
            assert saturation_warning(wrapped, model) is None

    def test_a_master_back_in_range_is_followed(self) -> None:
        weight = nn.Parameter(torch.full((1,), 65504.0, dtype=HALF))
        wrapped = MasterWeights(torch.optim.SGD([weight], lr=1.0), {weight: torch.full((1,), 7e4)})
        weight.grad = torch.full((1,), 10000.0, dtype=HALF)
        wrapped.step()
        assert weight.item() == 60000.0


class TestState:
    """The saved state is that of a plain optimizer, with the masters beside it."""

    @staticmethod
    def trained(
        cls: type[Optimizer], dtype: torch.dtype
    ) -> tuple[list[nn.Parameter], MasterWeights]:
        params = parameters(dtype)
        wrapped = MasterWeights(cls(params, lr=0.05))
        for step in range(2):
            set_gradients(params, gradients(step, cls))
            wrapped.step()
        return params, wrapped

    @pytest.mark.parametrize("dtype", [FP32, HALF])
    @pytest.mark.parametrize("cls", STEPPING)
    def test_resuming_is_exact(self, cls: type[Optimizer], dtype: torch.dtype) -> None:
        params, wrapped = self.trained(cls, dtype)
        resumed_params = parameters(dtype)
        for p in resumed_params:
            p.data.zero_()
        resumed = MasterWeights(cls(resumed_params, lr=0.05))
        resumed.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        if dtype == FP32:  # fp32 weights are the model's to save
            for p, source in zip(resumed_params, params, strict=True):
                p.data.copy_(source.data)
        assert same_bits(resumed_params, params)
        for owner, own in ((wrapped, params), (resumed, resumed_params)):
            set_gradients(own, gradients(7, cls))
            owner.step()
        assert same_bits(resumed_params, params)
        assert same_bits(state_tensors(resumed.optimizer), state_tensors(wrapped.optimizer))

    def test_adams_second_moment_survives_loading(self) -> None:
        """1e-11 is 0 in float16, and Adam divides by its root."""
        _, wrapped = self.trained(torch.optim.Adam, HALF)
        for state in wrapped.optimizer.state.values():
            state["exp_avg_sq"].fill_(1e-11)
        fresh = MasterWeights(torch.optim.Adam(parameters(HALF), lr=0.05))
        fresh.load_state_dict(wrapped.state_dict())
        kept = [state["exp_avg_sq"] for state in fresh.optimizer.state.values()]
        assert same_bits(kept, [torch.full((3, 4), 1e-11)] * 3)

    def test_into_a_plain_optimizer_and_back(self) -> None:
        _, wrapped = self.trained(torch.optim.AdamW, HALF)
        plain = torch.optim.AdamW(parameters(), lr=0.9)
        plain.load_state_dict(wrapped.state_dict())
        assert plain.param_groups[0]["lr"] == 0.05
        assert same_bits(state_tensors(plain), state_tensors(wrapped.optimizer))
        params, again = self.trained(torch.optim.AdamW, HALF)
        masters = [again.master_of(p).detach().clone() for p in params]
        again.load_state_dict(plain.state_dict())
        assert same_bits(state_tensors(again.optimizer), state_tensors(plain))
        assert same_bits([again.master_of(p) for p in params], masters)

    def test_masters_of_a_mixed_run_go_into_an_fp32_run(self) -> None:
        params, wrapped = self.trained(torch.optim.SGD, HALF)
        fp32_params = parameters()
        MasterWeights(torch.optim.SGD(fp32_params, lr=0.1)).load_state_dict(wrapped.state_dict())
        assert same_bits(fp32_params, [wrapped.master_of(p) for p in params])

    def test_a_state_of_other_parameters_is_refused_and_nothing_loaded(self) -> None:
        params, wrapped = self.trained(torch.optim.AdamW, HALF)
        before = snapshot(wrapped, params)
        other = MasterWeights(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
        with pytest.raises(
            CheckpointError, match="holds 1 masters, and not the shapes of the model's 3"
        ):
            wrapped.load_state_dict(other.state_dict())
        shapes = wrapped.state_dict()
        shapes["masters"] = [torch.zeros(2)] * 3
        with pytest.raises(CheckpointError, match="load it into the model it was made with"):
            wrapped.load_state_dict(shapes)
        groups = torch.optim.AdamW([{"params": [p]} for p in parameters()]).state_dict()
        with pytest.raises(CheckpointError, match=r"^optimizer state: .*load it into the model"):
            wrapped.load_state_dict(groups)
        assert unchanged(before, wrapped, params)

    def test_weights_by_name(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
        model, wrapped = Precision("mixed").prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        weights = {
            name: torch.randn_like(t, dtype=FP32)
            for name, t in wrapped.masters_by_name(model).items()
        }
        buffers = {name: torch.ones_like(b) for name, b in model.named_buffers()}
        wrapped.load_masters(model, weights | buffers)
        assert same_bits([wrapped.master_of(model[0].weight)], [weights["0.weight"]])
        assert same_bits([model[0].weight], [weights["0.weight"].half()])
        assert same_bits([model[2].running_mean], [torch.ones(3)])
        before = snapshot(wrapped, list(model.parameters()))
        for broken, text in (
            (
                {k: v for k, v in weights.items() if k != "1.bias"} | buffers,
                "'1.bias' is missing from the checkpoint",
            ),
            (weights | buffers | {"more": torch.ones(1)}, "'more' is unknown to the model"),
            (
                weights | buffers | {"1.bias": torch.ones(2)},
                r"'1.bias' has shape \(2,\) in the checkpoint and \(3,\)",
            ),
        ):
            with pytest.raises(CheckpointError, match=text):
                wrapped.load_masters(model, broken)
        assert unchanged(before, wrapped, list(model.parameters()))


class TestRefusals:
    """By name, in one line, with the way out."""

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), INF])
    def test_a_norm_that_nothing_can_be_clipped_to(self, value: float) -> None:
        params = parameters()
        wrapped = MasterWeights(torch.optim.SGD(params, lr=1.0))
        set_gradients(params, gradients(0, torch.optim.SGD))
        before = snapshot(wrapped, params)
        for optimizer in (wrapped, MultiOptimizer({"all": wrapped})):
            with pytest.raises(ConfigError) as error:
                optimizer.step(max_norm=value)
            assert str(error.value) == (
                f"max_norm={value}: must be a finite number > 0; None leaves the gradients as "
                "they are"
            )
        assert unchanged(before, wrapped, params)
        assert all(p.grad is not None for p in params)
        with pytest.raises(ConfigError, match=rf"^trainer.clip_norm={value}: must be a finite"):
            Plan(clip_norm=value)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), INF])
    def test_a_value_that_nothing_can_be_clipped_to(self, value: float) -> None:
        wrapped = MasterWeights(torch.optim.SGD(parameters(), lr=1.0))
        for optimizer in (wrapped, MultiOptimizer({"all": wrapped})):
            with pytest.raises(ConfigError, match=f"^max_value={value}: must be a finite number"):
                optimizer.step(max_value=value)
            with pytest.raises(ConfigError) as error:
                optimizer.step(max_norm=1.0, max_value=0.5)
            assert str(error.value) == ("max_norm and max_value: cannot be combined; give only one")
        with pytest.raises(ConfigError, match=rf"^trainer.clip_value={value}: must be a finite"):
            Plan(clip_value=value)
        with pytest.raises(ConfigError) as error:
            Plan(clip_norm=1.0, clip_value=0.5)
        assert str(error.value) == (
            "trainer.clip_norm and trainer.clip_value: cannot be combined; give only one"
        )

    def test_complex_parameters(self) -> None:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(ConfigError) as error:
            MasterWeights(torch.optim.SGD([weight], lr=0.1))
        assert str(error.value) == (
            "optimizer: parameter 0 of shape (2,) is torch.complex64; masters hold real numbers: "
            "store it as two real parameters"
        )

    def test_complex_parameters_of_a_model(self) -> None:
        model = nn.Linear(2, 2)
        model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
        for mode in ("fp32", "mixed", "amp"):
            with pytest.raises(ConfigError, match=r"parameter 'phase' is torch.complex64"):
                Precision(mode).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.weight.dtype == FP32

    def test_several_devices(self) -> None:
        params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))]
        with pytest.raises(ConfigError, match=r"parameters on cpu and meta; .* its own optimizer"):
            MasterWeights(torch.optim.SGD(params, lr=0.1))

    def test_wrapping_twice(self) -> None:
        model = nn.Linear(2, 2)
        optimizer, precision = torch.optim.SGD(model.parameters(), lr=0.1), Precision("mixed")
        precision.prepare(model, optimizer)
        with pytest.raises(ConfigError, match=r"^optimizer=SGD: has its masters already; use what"):
            precision.prepare(model, optimizer)

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"closure": lambda: None},
            {"closure": lambda: None, "scaler": Static(2.0)},
            {"closure": lambda: None, "max_norm": 1.0},
            {"closure": lambda: None, "max_value": 1.0},
            {"scaler": lambda: None},
        ],
    )
    def test_an_optimizer_that_evaluates_the_loss_itself(self, arguments: dict[str, Any]) -> None:
        wrapped = MasterWeights(torch.optim.LBFGS(parameters()))
        assert wrapped.needs_closure
        with pytest.raises(ConfigError) as error:
            wrapped.step(**arguments)
        assert str(error.value) == (
            "optimizer=LBFGS: evaluates the loss itself; step it with "
            "mpframe.training.optimizers.lbfgs, or use an optimizer without a closure"
        )

    @pytest.mark.parametrize("keep", [True, False])
    def test_half_weights_beside_a_closure(self, keep: bool) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(torch.optim.LBFGS(params), keep_masters=keep)
        text = "optimizer=LBFGS: a closure goes without half weights; use dtype=fp32 or"
        with pytest.raises(ConfigError, match=text):
            step_with_closure(wrapped, quadratic(params))

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_a_sparse_parameter_steps_as_in_torch(self, momentum: float) -> None:
        runs = []
        for wrap in (MasterWeights, lambda plain: plain):
            weight = torch.nn.Parameter(torch.eye(3).to_sparse())
            optimizer: Any = wrap(torch.optim.SGD([weight], lr=0.125, momentum=momentum))
            for _ in range(3):
                optimizer.zero_grad()
                torch.sparse.mm(weight, torch.ones(3, 2)).pow(2).sum().backward()
                optimizer.step()
            runs.append(weight.detach().to_dense())
        assert torch.equal(*runs)
        assert not torch.equal(runs[0], torch.eye(3))

    def test_a_closure_beside_an_optimizer_that_needs_none(self) -> None:
        params = parameters()
        wrapped = MasterWeights(torch.optim.SGD(params, lr=0.5))
        assert not wrapped.needs_closure
        wrapped.step(closure=quadratic(params))
        assert all(torch.allclose(p, torch.ones(3, 4)) for p in params)
