"""What fairseq, Megatron, Lightning and Accelerate test of precision and scaling, by behaviour."""

from math import log2
from typing import Any

import pytest
import torch
from ported import INF, NAN, cases, scales_after
from torch import nn
from vocabulary import HALVES

from mpframe import Backoff, MasterWeights, Precision

differs = pytest.mark.differs
MODES, TORCHS = ["amp", "mixed"], torch.amp.GradScaler("cpu")


def test_fairseq_one_step() -> None:
    """fairseq, test_mixed_precision: y = 3x + 5 is off by 1; Adam moves both weights by 0.1.

    The masters take 3.1 and 5.1, the half weights their rounding; the norm of the gradients
    (2, 1) is the root of 5; with a window of one step the scale doubles.
    """
    model = nn.Linear(1, 1)
    for parameter, value in zip(model.parameters(), (3.0, 5.0), strict=True):
        nn.init.constant_(parameter, value)
    precision, scaler = Precision("mixed", "float16"), Backoff(init_scale=1.0, growth_interval=1)
    _, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    with precision.cast():
        loss = nn.functional.l1_loss(model(torch.tensor([[2.0]])), torch.tensor([[12.0]]))
    (loss * scaler.scale).backward()
    result = optimizer.step(scaler)
    assert abs(result.grad_norm - 5.0**0.5) < 2.0**-21  # a unit in the last place of 2.236
    for parameter, value in zip(model.parameters(), (3.1, 5.1), strict=True):
        master = optimizer.master_of(parameter)
        # Adam's first step is lr up to its eps of 1e-8, and one rounding of a number below 8.
        assert abs(master.item() - value) < 1e-8 + 2.0**-21
        assert torch.equal(parameter, master.half())
    assert (loss, scaler.scale) == (1.0, 2.0)


RAISES = "fairseq raises at the floor; here the trainer stops, after some skips in a row"
# Of the dynamic loss scalers: which case, the rule, what is updated with, log2 of the scales.
SCALERS = {
    "fairseq, overflows": ({"init_scale": 8.0, "min_scale": 2.0}, [INF] * 4, [2, 1, 1, 1]),
    "fairseq, at the floor": ({"init_scale": 2.0, "min_scale": 2.0}, [INF], [1]),
    "Megatron, min_scale": ({"init_scale": 4.0, "min_scale": 1.0}, [NAN] * 5, [1, 0, 0, 0, 0]),
    "Accelerate, test_grad_scaler_kwargs: what is not given is as torch has it": (
        {"init_scale": 1024.0, "growth_factor": 4.0},
        [*[1.0] * TORCHS.get_growth_interval(), INF],
        [*[10] * (TORCHS.get_growth_interval() - 1), 12, 12 + log2(TORCHS.get_backoff_factor())],
    ),
}


@pytest.mark.parametrize("name", cases(SCALERS, {"fairseq, at the floor": RAISES}))
def test_scales(name: str) -> None:
    rule, amaxes, exponents = SCALERS[name]
    scaler = Backoff(**rule)
    assert scales_after(scaler, amaxes) == [2.0**exponent for exponent in exponents]
    assert scaler.floor == rule.get("min_scale", 1.0)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_lightning_forward_without_gradients_first(without: Any, mode: str, half: str) -> None:
    """Lightning, test_amp_with_no_grad and _inference_mode: a cast kept from there is not reused.

    torch.autocast's own cache gives a weight without gradient afterwards; Lightning works round it.
    """
    model, precision, x = nn.Linear(2, 1), Precision(mode, half), torch.randn(3, 2)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with precision.cast():
        with without():
            model(x)
        loss = model(x).mean()
    loss.backward()
    assert model.weight.grad.any()


@differs("Lightning refuses clipping beside a fused optimizer; here unscaling is ours")
def test_lightning_clipping_beside_a_fused_optimizer() -> None:
    """Lightning, test_optimizer_amp_scaling_support_in_step_method."""
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0, fused=fused))
        weight.grad = torch.full((4,), 8.0)
        assert optimizer.step(Backoff(init_scale=4.0), max_norm=1.0).grad_norm == 4.0
    assert torch.equal(*weights)
