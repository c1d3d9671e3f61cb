"""OpenSeq2Seq's tests of its mixed precision wrapper and of iter_size, and its Backoff rule.

Each test names the file of that suite whose cases it stands for.
"""

import pytest
import torch
from torch import Tensor, nn

from mpframe import Backoff, MasterWeights, Precision

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INF = float("inf")


@pytest.mark.parametrize("half", HALVES)
def test_weight_decay_acts_on_the_masters(half: str) -> None:
    """mp_wrapper_test, regularization_mixed: a decay of 1e-4 * 1e-4 reaches the fp32 weight."""
    weight = torch.full((2, 1), 1e-4)
    stored = nn.Parameter(weight.to(HALVES[half]))
    decay = torch.optim.SGD([stored], lr=1.0, weight_decay=1e-4)
    optimizer = MasterWeights(decay, {stored: weight.clone()})
    stored.grad = torch.zeros_like(stored)
    optimizer.step()
    wanted = weight - 1e-4 * weight  # 1e-8, a ten-thousandth of the weight
    assert torch.equal(optimizer.master_of(stored), wanted)


@pytest.mark.parametrize("half", HALVES)
def test_weight_decay_is_lost_without_masters(half: str) -> None:
    """mp_wrapper_test, regularization_normal: in half alone the same decay changes nothing."""
    stored = nn.Parameter(torch.full((2, 1), 1e-4, dtype=HALVES[half]))
    before = stored.detach().clone()
    decay = torch.optim.SGD([stored], lr=1.0, weight_decay=1e-4)
    optimizer = MasterWeights(decay, keep_masters=False)
    stored.grad = torch.zeros_like(stored)
    optimizer.step()
    assert torch.equal(stored, before)


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_convergence(mode: str) -> None:
    """mp_wrapper_test, convergence: least squares end within 0.01 of the solution.

    Four unknowns and 300 steps, where the original has ten and 6000: the well-conditioned problem
    is solved to 1e-4 in fp32, and float16 outputs of size 1 are good to 2^-11, which the inverse of
    the smallest singular value (here above 0.5) makes 0.001.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.linalg.qr(torch.randn(8, 4, generator=generator))[0]
    solution = torch.tensor([[0.5], [-0.25], [0.75], [0.1]])
    model = nn.Linear(4, 1, bias=False)
    precision = Precision(mode, "float16")
    _, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
        with precision.cast():
            loss = nn.functional.mse_loss(model(inputs), inputs @ solution)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(optimizer.master_of(model.weight), solution.t(), rtol=0.0, atol=0.01)


def window(model: nn.Linear, optimizer: MasterWeights, inputs: Tensor, targets: Tensor) -> Tensor:
    """One micro-batch accumulated; its gradient by the formula 2 X'(Xw - y) / n."""
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.accumulate()
    residual = inputs @ model.weight.detach().t() - targets
    return 2 * (inputs.t() @ residual).t() / len(inputs)


@pytest.mark.parametrize("size", [4, 8])
def test_iter_size(size: int) -> None:
    """optimizers_test, updates: nothing moves within a window, then by the mean of its gradients.

    1e-6: the formula sums its ten terms in another order than the kernel, 10 * 2^-24.
    """
    torch.manual_seed(0)
    inputs, targets = torch.rand(10, 5), torch.rand(10, 1)
    model = nn.Linear(5, 1, bias=False)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        before = model.weight.detach().clone()
        for _ in range(size):
            gradient = window(model, optimizer, inputs, targets)
            assert torch.equal(model.weight, before)
        optimizer.step()
        torch.testing.assert_close(model.weight, before - 0.1 * gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.differs("a window cut short is divided by the micro-batches it has, not by iter_size")
def test_a_window_cut_short() -> None:
    """optimizers_test, updates: four micro-batches in a window of eight move by half the mean."""
    torch.manual_seed(0)
    inputs, targets = torch.rand(10, 5), torch.rand(10, 1)
    model = nn.Linear(5, 1, bias=False)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    for _ in range(4):
        gradient = window(model, optimizer, inputs, targets)
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1 * gradient, rtol=1e-6, atol=1e-6)


def scales_of_the_rule(verdicts: str, window: int) -> list[float]:
    """OpenSeq2Seq's Backoff in our words: from the ceiling, counted from the last overflow."""
    scale, last, scales = 2.0**14, -1, []
    for step, verdict in enumerate(verdicts):
        if verdict == "x":
            scale, last = max(scale / 2, 1.0), step
        elif (step - last) % window == 0:
            scale = min(scale * 2, 2.0**14)
        scales.append(scale)
    return scales


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("verdicts", ["x....x.......", "xxxx..x..x.x.", "." * 13, "x" * 17 + "..."])
def test_backoff(verdicts: str, length: int) -> None:
    """automatic_loss_scaler: halves on overflow, doubles after a window, floor 1, ceiling 2^14."""
    scaler = Backoff(init_scale=2.0**14, max_scale=2.0**14, growth_interval=length)
    scales = []
    for verdict in verdicts:
        scaler.update(torch.tensor(INF if verdict == "x" else 1.0))
        scales.append(scaler.scale.item())
    assert scales == scales_of_the_rule(verdicts, length)
