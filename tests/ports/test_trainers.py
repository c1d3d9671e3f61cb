"""What fairseq, Megatron, DeepSpeed, OpenSeq2Seq, Lightning and Accelerate test, by behaviour."""

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


WINDOW = {"init_scale": 2.0**8, "growth_interval": 2}
# Of the dynamic loss scalers: which case, the rule, what is updated with, log2 of the scales.
SCALERS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "DeepSpeed, a window and one more": (WINDOW, [0.1, 0.1, 0.05], [8, 9, 9]),
    "DeepSpeed, no_overflow": (WINDOW, [0.1] * 6, [8, 9, 9, 10, 10, 11]),
    "DeepSpeed, all_overflow": (WINDOW, [INF, INF, *[NAN] * 8], [7, 6, 5, 4, 3, 2, 1, 0, 0, 0]),
    "DeepSpeed, some_overflow": (WINDOW, [INF, NAN, 0.1, 0.0, 0.1, INF], [7, 6, 6, 7, 7, 6]),
    "DeepSpeed, hysteresis": ({**WINDOW, "hysteresis": 3}, [INF] * 4, [8, 8, 7, 6]),
    "DeepSpeed, consecutive_hysteresis": (
        {"init_scale": 2.0**8, "hysteresis": 2}, [INF, 0.1] * 4, [8, 8, 7, 7, 6, 6, 5, 5],
    ),
    "fairseq, overflows": ({"init_scale": 8.0, "min_scale": 2.0}, [INF] * 4, [2, 1, 1, 1]),
    "fairseq, at the floor": ({"init_scale": 2.0, "min_scale": 2.0}, [INF], [1]),
    "Megatron, min_scale": ({"init_scale": 4.0, "min_scale": 1.0}, [NAN] * 5, [1, 0, 0, 0, 0]),
    "Accelerate, test_grad_scaler_kwargs: what is not given is as torch has it": (
        {"init_scale": 1024.0, "growth_factor": 4.0},
        [*[1.0] * TORCHS.get_growth_interval(), INF],
        [*[10] * (TORCHS.get_growth_interval() - 1), 12, 12 + log2(TORCHS.get_backoff_factor())],
    ),
}  # fmt: skip
REASONS = {
    "fairseq, at the floor":
        "fairseq raises at the floor; here the trainer stops, after some skips in a row",
    "DeepSpeed, no_overflow":
        "the scale grows on a window's last step, as torch's; there in the step after",
    "DeepSpeed, consecutive_hysteresis":
        "there is no consecutive_hysteresis: a clean step does not refill it",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(SCALERS, REASONS))
def test_scales(name: str) -> None:
    """What was counted survives a checkpoint, too."""
    rule, amaxes, exponents = SCALERS[name]
    first, scaler = Backoff(**rule), Backoff(**rule)
    scales = scales_after(first, amaxes[:1])
    scaler.load_state_dict(first.state_dict())
    scales += scales_after(scaler, amaxes[1:])
    assert scales == [2.0**exponent for exponent in exponents]
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


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_convergence(mode: str) -> None:
    """OpenSeq2Seq, mp_wrapper_test, convergence: least squares end within 0.01 of the solution.

    Four unknowns and 300 steps, where the original has ten and 6000: the well-conditioned problem
    is solved to 1e-4 in fp32, and float16 outputs of size 1 are good to 2^-11, which the inverse of
    the smallest singular value (here above 0.5) makes 0.001.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linalg.qr(torch.randn(8, 4, generator=generator))[0]
    solution = torch.tensor([[0.5], [-0.25], [0.75], [0.1]])
    model, precision = nn.Linear(4, 1, bias=False), Precision(mode, "float16")
    _, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
        with precision.cast():
            loss = nn.functional.mse_loss(model(inputs), inputs @ solution)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(optimizer.master_of(model.weight), solution.t(), rtol=0.0, atol=0.01)


SHORT = "a window cut short is divided by the micro-batches it has, not by iter_size"
CUT = pytest.mark.differs(SHORT)


@pytest.mark.parametrize(("size", "windows"), [(4, 3), (8, 3), pytest.param(4, 1, marks=CUT)])
def test_iter_size(size: int, windows: int) -> None:
    """OpenSeq2Seq, optimizers_test, updates: nothing moves within a window, then by the mean of its
    gradients 2 X'(Xw - y) / n; there, four micro-batches in a window of eight move by half of it.
    """
    torch.manual_seed(0)
    inputs, targets = torch.rand(10, 5), torch.rand(10, 1)
    model = nn.Linear(5, 1, bias=False)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(windows):
        before = model.weight.detach().clone()
        for _ in range(size):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.accumulate()
            assert torch.equal(model.weight, before)
        gradient = 2 * (inputs.t() @ (inputs @ before.t() - targets)).t() / len(inputs)
        optimizer.step()
        # The formula sums its ten terms in another order than the kernel, 10 * 2^-24.
        torch.testing.assert_close(model.weight, before - 0.1 * gradient, rtol=1e-6, atol=1e-6)
