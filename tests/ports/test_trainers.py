"""What fairseq, Megatron, Lightning and Accelerate test of precision and scaling, by behaviour."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, INF, NAN, scales_after

from mpframe import Backoff, MasterWeights, Precision
from mpframe.core.errors import ConfigError

differs = pytest.mark.differs
MODES = ["amp", "mixed"]


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


def test_fairseq_overflows_lower_the_scale() -> None:
    """fairseq, its dynamic loss scaler: half on each overflow, not below min_loss_scale."""
    assert scales_after(Backoff(init_scale=8.0, min_scale=2.0), [INF] * 4) == [4.0, 2.0, 2.0, 2.0]


@differs("fairseq raises at the floor; here the trainer stops, after some skips in a row")
def test_fairseq_at_the_floor() -> None:
    """fairseq, its dynamic loss scaler: FloatingPointError once the scale has reached its least."""
    scaler = Backoff(init_scale=2.0, min_scale=2.0)
    assert scales_after(scaler, [INF]) == [scaler.floor] == [2.0]


@pytest.mark.whole_masters
@pytest.mark.parametrize("half", HALVES)
def test_megatron_main_parameters(half: str) -> None:
    """Megatron, test_precision_aware_fused_adam: masters of half weights take fp32's own path."""
    start = torch.rand(301, generator=torch.Generator().manual_seed(0)).to(HALVES[half])
    plain, stored = nn.Parameter(start.float()), nn.Parameter(start.clone())
    settings: Any = {"lr": 1.0, "betas": (0.1, 0.25), "eps": 1e-8, "weight_decay": 0.0}
    reference = torch.optim.Adam([plain], **settings)
    optimizer = MasterWeights(torch.optim.Adam([stored], **settings))
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        stored.grad = torch.rand(301, generator=generator).to(HALVES[half])
        plain.grad = stored.grad.float()
        optimizer.step()
        reference.step()
        assert torch.equal(optimizer.master_of(stored), plain)
        assert torch.equal(stored, plain.to(HALVES[half]))


def test_megatron_hysteresis_refills_at_a_growth() -> None:
    """Megatron, its dynamic grad scaler: an overflow is absorbed until the next growth."""
    scaler = Backoff(init_scale=2.0**10, hysteresis=2, growth_interval=2)
    scales = scales_after(scaler, (INF, 1.0, INF, 1.0, 1.0, INF, INF))
    assert scales == [2.0**k for k in (10, 10, 9, 9, 10, 10, 9)]


def test_megatron_has_a_floor() -> None:
    """Megatron, its dynamic grad scaler: never below min_scale, which is above 0."""
    assert scales_after(Backoff(init_scale=4.0, min_scale=1.0), [NAN] * 5)[-1] == 1.0
    with pytest.raises(ConfigError, match=r"loss_scaling\.min_scale"):
        Backoff(min_scale=0.0)


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


def stepped(max_norm: float | None, fused: bool = False) -> tuple[Tensor, Tensor]:
    """The weights after a step with gradients of norm 4, and that norm as the step saw it."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0, fused=fused))
    scaler = Backoff(init_scale=4.0)
    weight.grad = torch.full((4,), 2.0) * scaler.scale
    return weight.detach(), optimizer.step(scaler, max_norm=max_norm).grad_norm


def test_lightning_clipping_is_off_without_a_value() -> None:
    """Lightning, test_clip_gradients: without a value nothing is clipped, with one the norm is."""
    clipped = -2.0 * (1.0 / (torch.tensor(4.0) + 1e-6)) * torch.ones(4)
    for max_norm, moved in ((None, torch.full((4,), -2.0)), (1.0, clipped)):
        weight, norm = stepped(max_norm)
        assert torch.equal(weight, moved)
        assert norm == 4.0


@differs("Lightning refuses clipping beside a fused optimizer; here unscaling is ours")
def test_lightning_clipping_beside_a_fused_optimizer() -> None:
    """Lightning, test_optimizer_amp_scaling_support_in_step_method."""
    assert torch.equal(stepped(1.0, fused=True)[0], stepped(1.0)[0])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", MODES)
def test_lightning_fused_parity(mode: str, half: str) -> None:
    """Lightning, test_amp_fused_optimizer_parity: five steps of Adam, fused or not, end alike.

    lr 1e-2: the two kernels order their roundings differently, a unit of 2^-23 for each of about
    ten operations on weights below 1, over five steps. Where a half weight fell on the other side
    of a rounding, the next gradients differ by that format's unit; Adam makes at most a share of lr
    of it.
    """

    def run(fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, precision, scaler = nn.Linear(4, 3), Precision(mode, half), Backoff()
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
        _, optimizer = precision.prepare(model, adam)
        for step in range(5):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            with precision.cast():
                loss = model(x).float().square().mean()
            (loss * scaler.scale).backward()
            optimizer.step(scaler)
            optimizer.zero_grad()
        return [optimizer.master_of(p).detach() for p in model.parameters()]

    for plain, fused in zip(run(False), run(True), strict=True):
        assert torch.allclose(plain, fused, rtol=0.0, atol=50 * 2.0**-23 + 1e-2 * 2.0**-6)


def test_lightning_a_step_left_out_leaves_the_scaler_out() -> None:
    """Lightning, test_skip_training_step_with_grad_scaler: no backward pass, no update."""
    weight, scaler = nn.Parameter(torch.zeros(1)), Backoff(growth_interval=3)
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    for step in range(5):
        if step % 2 == 0:
            weight.grad = torch.ones(1)
            optimizer.step(scaler)
    # Three updates, of which the third grew it.
    assert (scaler.scale, weight.item()) == (2.0**17, -3 / 2**16)


@pytest.mark.parametrize("mode", ["fp32", *MODES])
def test_accelerate_step_was_skipped(mode: str) -> None:
    """Accelerate, test_accelerated_optimizer_step_was_skipped: clean, nan, nan, clean."""
    model, scaler = nn.Linear(5, 5), Backoff()
    _, optimizer = Precision(mode).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for value in (0.01, NAN, NAN, 0.01):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
            parameter.grad[0] = value
        assert bool(optimizer.step(scaler).skipped) == (value != 0.01)
        optimizer.zero_grad()


def test_accelerate_scaler_options() -> None:
    """Accelerate, test_grad_scaler_kwargs: what is not given is as torch has it."""
    ours, torchs = Backoff(init_scale=1024.0, growth_factor=4.0), torch.amp.GradScaler("cpu")
    scales = scales_after(ours, [1.0] * torchs.get_growth_interval() + [INF])
    assert scales[-3:] == [1024.0, 4096.0, 4096.0 * torchs.get_backoff_factor()]
