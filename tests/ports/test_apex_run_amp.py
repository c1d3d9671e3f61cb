"""apex.amp's tests (run_amp, each file named here), by behaviour: O1 is our `amp`, O2 `mixed`."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES

from mpframe import Precision

FP32 = torch.float32
each = pytest.mark.parametrize


@pytest.fixture(params=[*product(HALVES, ["native", "emulated"])], ids=lambda p: "-".join(p))
def amp(request: pytest.FixtureRequest) -> Precision:
    half, compute = request.param
    return Precision("amp", half, compute=compute)


ONES = torch.ones(8, 8)
# What is run on a matrix, and the format of its result: half, fp32, or that of the matrix.
CASTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "Linear": (nn.Linear(8, 8), "half"),
    "linear": (lambda x: F.linear(x, ONES, ONES[0]), "half"),
    "Conv1d": (nn.Conv1d(8, 8, 3), "half"),
    "conv2d": (lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3)), "half"),
    "matmul, left": (lambda x: x.matmul(ONES), "half"),
    "matmul, right": (lambda x: ONES.matmul(x), "half"),
    "@, right": (lambda x: ONES @ x, "half"),
    "Softmax": (nn.Softmax(dim=1), "fp32"),
    "GroupNorm": (nn.GroupNorm(2, 8), "fp32"),
    "MSELoss": (lambda x: nn.MSELoss()(x, ONES), "fp32"),
    "pow": (lambda x: x.pow(2.0), "fp32"),
    "**": (lambda x: x**2.0, "fp32"),
    "sum": (lambda x: x.sum(), "fp32"),
    # apex refuses it in half.
    "BCELoss": (lambda x: nn.BCELoss()(x.sigmoid(), ONES), "fp32"),
    "ReLU": (nn.ReLU(), "input"),
    "BatchNorm1d": (nn.BatchNorm1d(8), "input"),
    "BatchNorm1d in evaluation": (nn.BatchNorm1d(8).eval(), "input"),
    # test_promotion: of two formats the widest, but x.add_(y) is as x.
    "atan2": (lambda x: torch.atan2(x, ONES), "fp32"),
    "mul, half": (lambda x: torch.mul(x, ONES.to(x.dtype)), "input"),
    "cat": (lambda x: torch.cat([x, x.detach(), ONES]), "fp32"),
    "cat, half": (lambda x: torch.cat([x, x.detach()]), "input"),
    "x.add_": (lambda x: x.clone().add_(ONES), "input"),
}


@each("name", CASTS)
def test_basic_casts_and_promotion(name: str, amp: Precision) -> None:
    """test_basic_casts: layers, functions, methods and operators; gradients are as their tensor."""
    function, rule = CASTS[name]
    half = amp.policy.half_dtype
    for dtype in (FP32, half):
        x = torch.rand(8, 8).to(dtype).requires_grad_()
        with amp.cast():
            y = function(x)
        y.float().sum().backward()
        assert (y.dtype, x.grad.dtype) == ({"half": half, "fp32": FP32}.get(rule, dtype), dtype)


class TrustRatio:
    """An optimizer around an optimizer, as LARC: scales gradients by |w| / |g|, then steps it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> None:
        for weight in (p for group in self.inner.param_groups for p in group["params"]):
            weight.grad.mul_(weight.norm() / weight.grad.norm().clamp(min=1e-6))
        self.inner.step(closure)


@each(("mode", "half"), [("fp32", "float16"), *product(("amp", "mixed"), HALVES)])
def test_larc(mode: str, half: str) -> None:
    """test_larc: a wrapper around the optimizer runs in every mode; it sees fp32 masters."""
    torch.manual_seed(0)
    model, precision = nn.Linear(3, 2), Precision(mode, half)
    twin = copy.deepcopy(model)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.125) for m in (model, twin)]
    larc, plain = map(TrustRatio, sgd)
    _, optimizer = precision.prepare(model, larc)
    pairs = [*zip(model.parameters(), twin.parameters(), strict=True)]
    for _ in range(2):
        with precision.cast():
            loss = model(torch.ones(4, 3)).float().square().sum()
        loss.backward()
        for ours, theirs in pairs:
            theirs.grad = ours.grad.to(FP32, copy=True)
        assert not optimizer.step().skipped
        optimizer.zero_grad()
        plain.step()
    assert all(torch.equal(optimizer.master_of(ours), theirs) for ours, theirs in pairs)
