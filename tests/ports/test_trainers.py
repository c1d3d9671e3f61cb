"""What fairseq, Megatron, DeepSpeed, OpenSeq2Seq, Lightning and Accelerate test, by behaviour."""

from math import log2
from typing import Any

import pytest
import torch
from torch import nn
from vocabulary import INF, NAN

from mpframe import Backoff, MasterWeights, Precision

TORCHS = torch.amp.GradScaler("cpu")


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
# Of the dynamic loss scalers: the rule, what is updated with, log2 of the scales, what differs.
SCALERS: dict[str, tuple[dict[str, Any], list[float], list[float], str]] = {
    "DeepSpeed, no_overflow": (
        WINDOW, [0.1] * 6, [8, 9, 9, 10, 10, 11],
        "the scale grows on a window's last step, as torch's; there in the step after",
    ),
    "DeepSpeed, all_overflow; Megatron, min_scale": (
        WINDOW, [INF, INF, *[NAN] * 8], [7, 6, 5, 4, 3, 2, 1, 0, 0, 0], "",
    ),
    "DeepSpeed, some_overflow": (WINDOW, [INF, NAN, 0.1, 0.0, 0.1, INF], [7, 6, 6, 7, 7, 6], ""),
    "DeepSpeed, consecutive_hysteresis": (
        {"init_scale": 2.0**8, "hysteresis": 2}, [INF, 0.1] * 4, [8, 8, 7, 7, 6, 6, 5, 5],
        "there is no consecutive_hysteresis: a clean step does not refill it",
    ),
    "fairseq, at the floor": (
        {"init_scale": 4.0, "min_scale": 2.0}, [INF] * 3, [1, 1, 1],
        "fairseq raises at the floor; here the trainer stops, after some skips in a row",
    ),
    "Accelerate, test_grad_scaler_kwargs: what is not given is as torch has it": (
        {"init_scale": 1024.0, "growth_factor": 4.0},
        [*[1.0] * TORCHS.get_growth_interval(), INF],
        [*[10] * (TORCHS.get_growth_interval() - 1), 12, 12 + log2(TORCHS.get_backoff_factor())],
        "",
    ),
}  # fmt: skip
MARKS = {name: [pytest.mark.differs(why)] for name, (*_, why) in SCALERS.items() if why}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in SCALERS])
def test_scales(name: str) -> None:
    """What was counted survives a checkpoint, too."""
    rule, amaxes, exponents, _ = SCALERS[name]
    scaler, scales = Backoff(**rule), []
    for amax in amaxes:
        scaler.update(torch.tensor(amax))
        scales.append(scaler.scale.item())
        last, scaler = scaler, Backoff(**rule)
        scaler.load_state_dict(last.state_dict())
    assert scales == [2.0**exponent for exponent in exponents]


@pytest.mark.parametrize("mode", ["amp", "mixed"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_lightning_forward_without_gradients_first(without: Any, mode: str) -> None:
    """Lightning, test_amp_with_no_grad and _inference_mode: a cast kept from there is not reused.

    torch.autocast's own cache gives a weight without gradient afterwards; Lightning works round it.
    """
    model, precision, x = nn.Linear(2, 1), Precision(mode, "bfloat16"), torch.randn(3, 2)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with precision.cast():
        with without():
            model(x)
        loss = model(x).mean()
    loss.backward()
    assert model.weight.grad.any()


CUT = pytest.mark.differs(
    "a window cut short is divided by the micro-batches it has, not by iter_size"
)


@pytest.mark.parametrize(("size", "windows"), [(4, 3), pytest.param(3, 1, marks=CUT)])
def test_iter_size(size: int, windows: int) -> None:
    """OpenSeq2Seq, optimizers_test, updates: nothing moves within a window, then by the mean of its
    gradients 2 X'(Xw - y) / n; there, three micro-batches in a window of six move by half of it.
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
