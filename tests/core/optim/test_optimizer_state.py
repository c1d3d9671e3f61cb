"""What is saved of optimizer and masters, and weights beyond the half range."""

import copy
import itertools

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

from mpframe import MasterWeights, Precision
from mpframe.core.errors import CheckpointError
from mpframe.training.callbacks.guards import saturation_warning

FP32, HALF = torch.float32, torch.float16
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


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

    @pytest.mark.parametrize(
        ("cls", "dtype"), [*zip(STEPPING, itertools.cycle([HALF, FP32])), (SGD, FP32)]
    )
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
        _, wrapped = self.trained(AdamW, HALF)
        plain = AdamW(parameters(), lr=0.9)
        plain.load_state_dict(wrapped.state_dict())
        assert plain.param_groups[0]["lr"] == 0.05
        assert same_bits(state_tensors(plain), state_tensors(wrapped.optimizer))
        params, again = self.trained(AdamW, HALF)
        masters = [again.master_of(p).detach().clone() for p in params]
        again.load_state_dict(plain.state_dict())
        assert same_bits(state_tensors(again.optimizer), state_tensors(plain))
        assert same_bits([again.master_of(p) for p in params], masters)

    def test_masters_of_a_mixed_run_go_into_an_fp32_run(self) -> None:
        params, wrapped = self.trained(SGD, HALF)
        fp32_params = parameters()
        MasterWeights(SGD(fp32_params, lr=0.1)).load_state_dict(wrapped.state_dict())
        assert same_bits(fp32_params, [wrapped.master_of(p) for p in params])

    def test_a_state_of_other_parameters_is_refused_and_nothing_loaded(self) -> None:
        params, wrapped = self.trained(AdamW, HALF)
        before = snapshot(wrapped, params)
        other = MasterWeights(AdamW([nn.Parameter(torch.zeros(2))]))
        with pytest.raises(
            CheckpointError, match="holds 1 masters, and not the shapes of the model's 3"
        ):
            wrapped.load_state_dict(other.state_dict())
        shapes = wrapped.state_dict()
        shapes["masters"] = [torch.zeros(2)] * 3
        with pytest.raises(CheckpointError, match="load it into the model it was made with"):
            wrapped.load_state_dict(shapes)
        groups = AdamW([{"params": [p]} for p in parameters()]).state_dict()
        with pytest.raises(CheckpointError, match=r"^optimizer state: .*load it into the model"):
            wrapped.load_state_dict(groups)
        assert unchanged(before, wrapped, params)

    def test_weights_by_name(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
        model, wrapped = Precision("mixed").prepare(model, SGD(model.parameters(), 0.1))
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


class TestSaturation:
    """A weight beyond the half range is held at its end, counted and warned about."""

    def test_never_inf(self) -> None:
        model = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1e5, -1e9], [65504.0, 1.0]]))
        precision = Precision("mixed")
        model, wrapped = precision.prepare(model, SGD(model.parameters(), lr=1.0))
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
        _, wrapped = Precision("mixed").prepare(model, SGD(model.parameters()))
        said = saturation_warning(wrapped, model)
        assert said is not None
        assert "10 weights" in said
        assert "(3.weight, 2.weight, 1.weight, ...)" in said

    def test_silent_otherwise(self) -> None:
        for mode in ("fp32", "mixed", "amp"):
            model = nn.Linear(2, 2)
            model, wrapped = Precision(mode).prepare(model, SGD(model.parameters()))
            assert saturation_warning(wrapped, model) is None

    def test_a_master_back_in_range_is_followed(self) -> None:
        weight = nn.Parameter(torch.full((1,), 65504.0, dtype=HALF))
        wrapped = MasterWeights(SGD([weight], lr=1.0), {weight: torch.full((1,), 7e4)})
        weight.grad = torch.full((1,), 10000.0, dtype=HALF)
        wrapped.step()
        assert weight.item() == 60000.0
