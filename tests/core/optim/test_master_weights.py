"""fp32 masters around every optimizer of torch: exactness, groups, what is refused."""

import itertools
from typing import Any

import pytest
import torch
from small_steps import (
    STEPPING,
    gradients,
    parameters,
    quadratic,
    set_gradients,
    snapshot,
    sparse,
    state_tensors,
    unchanged,
)
from torch import nn
from torch.optim import Optimizer
from vocabulary import HALVES, formats, same_bits

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import dtype_map
from mpframe.training.optimizers.lbfgs import step_with_closure
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan

FP32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class TestFp32:
    """Over fp32 parameters the wrapper is invisible."""

    @pytest.mark.parametrize(
        ("cls", "scale"), [*((c, 2.0**10) for c in STEPPING), (SGD, 2.0**-9), (AdamW, None)]
    )
    def test_equals_the_plain_optimizer_bit_for_bit(
        self, cls: type[Optimizer], scale: float | None
    ) -> None:
        """Also under a power-of-two scale: it moves exponents, no other bit."""
        plain_params, params = parameters(), parameters()
        plain, wrapped = cls(plain_params, lr=0.05), MasterWeights(cls(params, lr=0.05))
        scaler = None if scale is None else Static(scale)
        for step in range(3):
            set_gradients(plain_params, gradients(step, cls))
            plain.step()
            set_gradients(params, gradients(step, cls), scale or 1.0)
            wrapped.step(scaler)
            assert same_bits(params, plain_params)
        assert same_bits(state_tensors(wrapped.optimizer), state_tensors(plain))
        assert all(wrapped.master_of(p) is p for p in params)

    def test_equals_the_plain_optimizer_with_a_closure(self) -> None:
        plain_params, params = parameters(), parameters()
        plain = torch.optim.LBFGS(plain_params, lr=0.5)
        wrapped = MasterWeights(torch.optim.LBFGS(params, lr=0.5))
        for _ in range(3):
            loss = plain.step(quadratic(plain_params))
            result = step_with_closure(wrapped, quadratic(params))
            assert torch.equal(result.loss, loss)  # type: ignore[arg-type]
            assert [p.grad for p in params] == [None] * 3
        assert same_bits(params, plain_params)

    @pytest.mark.parametrize(
        ("cls", "clip"),
        [(SGD, {"max_norm": 0.1}), (SGD, {"max_norm": 1e9}), (AdamW, {"max_value": 0.1})],
    )
    def test_clipping_is_torchs(self, cls: type[Optimizer], clip: dict[str, float]) -> None:
        plain_params, params = parameters(), parameters()
        plain, wrapped = cls(plain_params, lr=0.1), MasterWeights(cls(params, lr=0.1))
        for step in range(2):
            set_gradients(plain_params, gradients(step, cls))
            set_gradients(params, gradients(step, cls), 2.0**7)
            norm = nn.utils.get_total_norm([p.grad for p in plain_params])
            if "max_norm" in clip:
                nn.utils.clip_grad_norm_(plain_params, clip["max_norm"])
            else:
                nn.utils.clip_grad_value_(plain_params, clip["max_value"])
            plain.step()
            assert torch.equal(wrapped.step(Static(2.0**7), **clip).grad_norm, norm)
            assert same_bits(params, plain_params)

    def test_parameters_of_several_formats(self) -> None:
        params = [parameters(d)[0] for d in (FP32, HALF, BFLOAT16, torch.float64)]
        wrapped = MasterWeights(SGD(params, lr=1.0))
        set_gradients(params, [torch.ones(3, 4)] * 4, 4.0)
        before = [wrapped.master_of(p).detach().clone() for p in params]
        result = wrapped.step(Static(4.0))
        assert (result.amax.item(), result.amax.dtype) == (1.0, FP32)
        assert result.grad_norm.item() == pytest.approx(48**0.5)
        assert same_bits([wrapped.master_of(p) for p in params], [b - 1 for b in before])


class TestHalf:
    """Half parameters: the update acts on fp32 masters."""

    @pytest.mark.parametrize(("cls", "half"), [*zip(STEPPING, itertools.cycle(HALVES))])
    def test_masters_are_what_the_plain_optimizer_makes_in_fp32(
        self, cls: type[Optimizer], half: str
    ) -> None:
        """Given the same (half) gradients, masters are the fp32 weights; the weights round them."""
        plain_params, params = parameters(), parameters()
        masters = {p: p.detach().clone() for p in params}
        for p in params:
            p.data = p.data.to(HALVES[half])
        plain, wrapped = cls(plain_params, lr=0.05), MasterWeights(cls(params, lr=0.05), masters)
        for step in range(2):
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
        weight = nn.Parameter(torch.ones(1, dtype=BFLOAT16))
        wrapped = MasterWeights(SGD([weight], lr=2.0**-12), keep_masters=keep)
        for _ in range(32):
            weight.grad = -torch.ones(1, dtype=BFLOAT16)
            wrapped.step()
        assert weight.item() == expected

    @pytest.mark.parametrize("arrives", [FP32, HALF])
    def test_masters_start_from_before_the_rounding(self, arrives: torch.dtype) -> None:
        model = nn.Linear(4, 4).to(arrives)
        before = model.weight.detach().clone()
        model, wrapped = Precision("mixed").prepare(model, SGD(model.parameters(), lr=0.1))
        assert same_bits([model.weight], [before.half()])
        assert same_bits([wrapped.master_of(model.weight)], [before.float()])

    def test_without_masters_state_and_update_are_half(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(SGD(params, lr=0.1, momentum=0.9), keep_masters=False)
        set_gradients(params, gradients(0, SGD), 1024.0)
        wrapped.step(Static(1024.0))
        assert all(wrapped.master_of(p) is p for p in params)
        assert formats(state_tensors(wrapped.optimizer)) == {HALF}

    def test_state_made_before_wrapping_is_widened(self) -> None:
        params = parameters(HALF)
        optimizer = SGD(params, lr=0.1, momentum=0.9)
        set_gradients(params, gradients(0, SGD))
        optimizer.step()
        MasterWeights(optimizer)
        assert formats(state_tensors(optimizer)) == {FP32}


class TestParameters:
    """Kinds of parameters a model can have."""

    def test_no_gradients_at_all(self) -> None:
        params = parameters(HALF)
        wrapped = MasterWeights(AdamW(params, weight_decay=0.5))
        before = snapshot(wrapped, params)
        result = wrapped.step(Backoff(), max_norm=1.0)
        assert (result.amax.item(), result.grad_norm.item(), bool(result.skipped)) == (0, 0, False)
        assert unchanged(before, wrapped, params)

    @pytest.mark.parametrize(
        ("dtype", "options"), [(FP32, {}), (HALF, {"fused": True}), (HALF, {"foreach": True})]
    )
    def test_frozen_unused_and_empty(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        used, unused, frozen = parameters(dtype)
        frozen.requires_grad_(False)
        empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        params = [used, unused, frozen, empty]
        wrapped = MasterWeights(AdamW(params, lr=0.1, **options))
        before = [wrapped.master_of(p).detach().clone() for p in params]
        for _ in range(2):
            used.grad, empty.grad = torch.ones_like(used), torch.zeros_like(empty)
            result = wrapped.step(Static(2.0), max_norm=1e3)
        assert result.amax.item() == 0.5
        after = [wrapped.master_of(p) for p in params]
        assert not torch.equal(after[0], before[0])
        assert same_bits(after[1:], before[1:])
        assert wrapped.master_of(frozen).requires_grad is False

    def test_a_group_without_parameters_and_one_of_empty_ones(self) -> None:
        empty = nn.Parameter(torch.zeros(0))
        wrapped = MasterWeights(SGD([{"params": []}, {"params": [empty]}], lr=0.1))
        empty.grad = torch.zeros(0)
        assert wrapped.step(Static(2.0), max_norm=1.0).amax.item() == 0

    def test_tied_weights_have_one_master(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model, wrapped = Precision("mixed").prepare(model, SGD(model.parameters(), 1.0))
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
        precision.prepare(model, SGD(model.parameters(), lr=0.1))
        assert model["head"].weight.dtype == FP32
        assert model["head"].bias.dtype == HALF
        assert rows == {"embed": FP32, "head": FP32}
        with precision.cast():
            assert model["head"](model["embed"](torch.tensor([1]))).dtype == HALF

    def test_groups_added_later_start_from_before_the_rounding(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first = model[0].weight.detach().clone()
        model, wrapped = Precision("mixed").prepare(model, SGD(model[1].parameters(), 0.1))
        wrapped.add_param_group({"params": list(model[0].parameters()), "lr": 1.0})
        assert same_bits([wrapped.master_of(model[0].weight)], [first])
        model[0].weight.grad = torch.ones(4, 4, dtype=HALF)
        wrapped.step()
        assert same_bits([wrapped.master_of(model[0].weight)], [first - 1])


class TestGroups:
    """The groups show the model's own parameters; gradients left at masters count."""

    def test_their_parameters_are_the_models(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [{"params": list(layer.parameters())} for layer in model]
        model, wrapped = Precision("mixed").prepare(model, SGD(groups, lr=0.1))
        shown = [p for group in wrapped.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(shown, model.parameters(), strict=True))

    def test_all_else_is_shared(self) -> None:
        wrapped = MasterWeights(SGD(parameters(HALF), lr=0.1, momentum=0.9))
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
        wrapped = MasterWeights(AdamW(params, lr=0.1))
        assert wrapped.defaults is wrapped.optimizer.defaults
        set_gradients(params, gradients(0, AdamW))
        wrapped.step()
        for parameter in params:
            inner = wrapped.optimizer.state[wrapped.master_of(parameter)]
            assert wrapped.state[parameter] is inner

    @pytest.mark.parametrize("mode", ["mixed", "amp"])
    def test_clipping_over_the_groups_acts(self, mode: str) -> None:
        model = nn.Linear(4, 4)
        model, wrapped = Precision(mode).prepare(model, SGD(model.parameters(), 1.0))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        listed = [p for group in wrapped.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(listed, 0.5)
        # 20 gradients of 1, of norm 4.5, to 0.5: halves hold each to 2^-11 of its size.
        assert wrapped.step().grad_norm.item() == pytest.approx(0.5, rel=2.0**-10)

    @pytest.mark.whole_masters
    @pytest.mark.parametrize(("way", "half"), [("step", "float16"), ("accumulate", "bfloat16")])
    def test_a_penalty_on_masters_counts(self, way: str, half: str) -> None:
        """As scaled as the loss, and added in fp32: 2^-13 beside 1 is nothing in half."""
        weight = nn.Parameter(torch.zeros(2, dtype=HALVES[half]))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        for total in (1 + 2.0**-13, 2 + 2.0**-12):
            weight.grad = torch.full_like(weight, 4.0)
            (wrapped.master_of(weight).sum() * 2.0**-11).backward()
            if way == "accumulate":
                wrapped.accumulate(4.0)
            result = wrapped.step(Static(4.0))
            assert result.amax.item() == 1 + 2.0**-13
            assert wrapped.master_of(weight).tolist() == [-total, -total]

    @pytest.mark.parametrize("sparse_one", ["weight", "master", "both"])
    def test_a_penalty_beside_sparse_gradients(self, sparse_one: str) -> None:
        weight = nn.Parameter(torch.zeros(2, 1, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=1.0))
        row = sparse([0], torch.ones(1, 1), (2, 1))
        weight.grad = row.half() if sparse_one != "master" else row.to_dense().half()
        wrapped.master_of(weight).grad = row if sparse_one != "weight" else row.to_dense()
        wrapped.step()
        assert wrapped.master_of(weight).flatten().tolist() == [-2.0, 0.0]


class TestRefusals:
    """By name, in one line, with the way out."""

    @pytest.mark.parametrize("name", ["norm", "value"])
    def test_what_nothing_can_be_clipped_to(self, name: str) -> None:
        params = parameters()
        wrapped = MasterWeights(SGD(params, lr=1.0))
        set_gradients(params, gradients(0, SGD))
        before = snapshot(wrapped, params)
        several: Any = MultiOptimizer({"all": wrapped})
        for value, step in itertools.product([0.0, -1.0, NAN, INF], [wrapped.step, several.step]):
            text = f"{value}: must be a finite number > 0"
            with pytest.raises(ConfigError, match=f"^max_{name}={text}; None leaves the"):
                step(**{f"max_{name}": value})
            with pytest.raises(ConfigError, match=rf"^trainer.clip_{name}={text}"):
                Plan(**{f"clip_{name}": value})
        assert unchanged(before, wrapped, params)
        assert all(p.grad is not None for p in params)

    def test_two_ways_of_clipping(self) -> None:
        wrapped = MasterWeights(SGD(parameters(), lr=1.0))
        text = "cannot be combined; give only one"
        for optimizer in (wrapped, MultiOptimizer({"all": wrapped})):
            with pytest.raises(ConfigError, match=f"^max_norm and max_value: {text}$"):
                optimizer.step(max_norm=1.0, max_value=0.5)
        with pytest.raises(ConfigError, match=f"clip_norm and trainer.clip_value: {text}$"):
            Plan(clip_norm=1.0, clip_value=0.5)

    def test_complex_parameters(self) -> None:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(ConfigError) as error:
            MasterWeights(SGD([weight], lr=0.1))
        assert str(error.value) == (
            "optimizer: parameter 0 of shape (2,) is torch.complex64; masters hold real numbers: "
            "store it as two real parameters"
        )

    def test_complex_parameters_of_a_model(self) -> None:
        model = nn.Linear(2, 2)
        model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
        for mode in ("fp32", "mixed", "amp"):
            with pytest.raises(ConfigError, match=r"parameter 'phase' is torch.complex64"):
                Precision(mode).prepare(model, SGD(model.parameters(), lr=0.1))
        assert model.weight.dtype == FP32

    def test_several_devices(self) -> None:
        params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))]
        with pytest.raises(ConfigError, match=r"parameters on cpu and meta; .* its own optimizer"):
            MasterWeights(SGD(params, lr=0.1))

    def test_wrapping_twice(self) -> None:
        model = nn.Linear(2, 2)
        optimizer, precision = SGD(model.parameters(), lr=0.1), Precision("mixed")
        precision.prepare(model, optimizer)
        with pytest.raises(ConfigError, match=r"^optimizer=SGD: has its masters already; use what"):
            precision.prepare(model, optimizer)

    @pytest.mark.parametrize(
        "arguments",
        [{}, {"closure": lambda: None, "scaler": Static(2.0)}, {"scaler": lambda: None}],
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

    def test_a_sparse_parameter_steps_as_in_torch(self) -> None:
        runs = []
        for wrap in (MasterWeights, lambda plain: plain):
            weight = torch.nn.Parameter(torch.eye(3).to_sparse())
            optimizer: Any = wrap(SGD([weight], lr=0.125, momentum=0.9))
            for _ in range(3):
                optimizer.zero_grad()
                torch.sparse.mm(weight, torch.ones(3, 2)).pow(2).sum().backward()
                optimizer.step()
            runs.append(weight.detach().to_dense())
        assert torch.equal(*runs)
        assert not torch.equal(runs[0], torch.eye(3))
