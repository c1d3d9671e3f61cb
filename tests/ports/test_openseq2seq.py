"""OpenSeq2Seq's tests (each file named here) of mixed precision, iter_size and its Backoff rule."""

import pytest
import torch
from torch import nn
from vocabulary import HALVES, INF, scales_after

from mpframe import Backoff, MasterWeights, Precision


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("half", HALVES)
def test_weight_decay_acts_on_the_masters(half: str, masters: bool) -> None:
    """mp_wrapper_test, regularization_mixed and _normal: a decay of 1e-8, a ten-thousandth of the
    weight, reaches the fp32 master; in half alone it changes nothing."""
    weight = torch.full((2, 1), 1e-4)
    stored = nn.Parameter(weight.to(HALVES[half]))
    before, decay = stored.detach().clone(), torch.optim.SGD([stored], lr=1.0, weight_decay=1e-4)
    kept = {stored: weight.clone()} if masters else None
    optimizer = MasterWeights(decay, kept, keep_masters=masters)
    stored.grad = torch.zeros_like(stored)
    optimizer.step()
    if masters:
        assert torch.equal(optimizer.master_of(stored), weight - 1e-4 * weight)
    else:
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


CUT = pytest.mark.differs(
    "a window cut short is divided by the micro-batches it has, not by iter_size"
)


@pytest.mark.parametrize(("size", "windows"), [(4, 3), (8, 3), pytest.param(4, 1, marks=CUT)])
def test_iter_size(size: int, windows: int) -> None:
    """optimizers_test, updates: nothing moves within a window, then by the mean of its gradients
    2 X'(Xw - y) / n; there, four micro-batches in a window of eight move by half the mean."""
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
    scales = scales_after(scaler, [INF if verdict == "x" else 1.0 for verdict in verdicts])
    assert scales == scales_of_the_rule(verdicts, length)
