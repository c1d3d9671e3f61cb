"""OpenSeq2Seq's tests (each file named here) of mixed precision and iter_size."""

import pytest
import torch
from torch import nn

from mpframe import MasterWeights, Precision


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


SHORT = "a window cut short is divided by the micro-batches it has, not by iter_size"
CUT = pytest.mark.differs(SHORT)


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
