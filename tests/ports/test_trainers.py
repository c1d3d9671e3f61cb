"""What torch's GradScaler and the tests of fairseq, Megatron, DeepSpeed, OpenSeq2Seq, Lightning,
Accelerate and apex.amp (run_amp) ask for, by behaviour.

torch's own cases give gradients by hand, beside the real GradScaler over fp32 weights. Ours is
`Backoff` with the same numbers and `MasterWeights`, over fp32 weights and over half ones, whose
gradients are rounded to half. Scales are powers of two, so equal means torch.equal.
"""

import copy
from collections.abc import Callable
from itertools import product
from math import log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW
from vocabulary import HALVES, INF, NAN

from mpframe import Backoff, MasterWeights, Precision

RULES: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
Make = Callable[[Any], Any]
each = pytest.mark.parametrize


class Twins:
    """The same weights twice: ours in a storage format, and torch's in fp32."""

    def __init__(self, kept: str, make: Make = lambda p: SGD(p, lr=0.5)) -> None:
        precision = Precision("fp32") if kept == "fp32" else Precision("mixed", kept)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.twin = copy.deepcopy(self.model)
        self.model, self.optimizer = precision.prepare(self.model, make(self.model.parameters()))
        self.reference = make(self.twin.parameters())
        self.pairs = [*zip(self.model.parameters(), self.twin.parameters(), strict=True)]
        self.scaler = Backoff(2.0**7, max_scale=2.0**100, min_scale=2.0**-100, **RULES)
        self.grad_scaler = GradScaler("cpu", 2.0**7, **RULES)
        self.grad_scaler.scale(torch.ones(()))  # It makes its state when it is first used.

    def give(self, step: int, *, spoil: float | None = None) -> None:
        """Leave what a backward pass of the scaled loss leaves, maybe with one bad value."""
        generator = torch.Generator().manual_seed(step)
        for index, (ours, theirs) in enumerate(self.pairs):
            scaled = torch.randn(ours.shape, generator=generator) * self.scaler.scale
            if spoil is not None and index == step % 2:
                scaled[0] = spoil
            ours.grad = scaled.to(ours.dtype)
            theirs.grad = ours.grad.to(torch.float32, copy=True)

    def step(self, max_norm: float | None = None) -> bool:
        """One step of both, after which they agree; whether it was skipped."""
        if max_norm is not None:
            self.grad_scaler.unscale_(self.reference)
            nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm)
        self.grad_scaler.step(self.reference)
        self.grad_scaler.update()
        result = self.optimizer.step(self.scaler, max_norm=max_norm)
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        assert self.scaler.scale.item() == self.grad_scaler.get_scale()
        for ours, theirs in self.pairs:
            assert torch.equal(self.optimizer.master_of(ours), theirs)
            assert torch.equal(ours, theirs.to(ours.dtype))
        return bool(result.skipped)


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


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.5),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw, foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "adam, amsgrad, foreach": lambda p: Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adam, fused": lambda p: Adam(p, lr=0.1, fused=True),
    "adamw, fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adagrad, fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "sgd, fused": lambda p: SGD(p, lr=0.1, fused=True),
    "apex, LARC": lambda p: TrustRatio(SGD(p, lr=0.25, momentum=0.125)),
}


@pytest.mark.usefixtures("waited_for")
@each("kept", ["fp32", "float16", "bfloat16"])
@each("max_norm", [None, 0.5])
@each("verdicts", ["....", "x....", "..x.x...", "xx.."])
@each("name", OPTIMIZERS)
def test_training_with_bad_steps(
    name: str, verdicts: str, max_norm: float | None, kept: str
) -> None:
    """torch: a step with an inf or a nan is skipped, and the scale grows and falls by its rule.

    A fused optimizer of torch multiplies by the inverse of the scale inside its kernel: by a power
    of two, so exactly.
    """
    twins = Twins(kept, OPTIMIZERS[name])
    for step, verdict in enumerate(verdicts):
        twins.give(step, spoil=(INF, NAN)[step % 2] if verdict == "x" else None)
        assert twins.step(max_norm) == (verdict == "x")


TORCHS, WINDOW = GradScaler("cpu"), {"init_scale": 2.0**8, "growth_interval": 2}
# Of the dynamic loss scalers: the rule, what is updated with, log2 of the scales.
SCALERS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    # It grows in the step after a window's last, and torch's, as ours, on that.
    "DeepSpeed, no_overflow": (WINDOW, [0.1] * 6, [8, 9, 9, 10, 10, 11]),
    "DeepSpeed, all_overflow; Megatron, min_scale": (
        WINDOW, [INF, INF, *[NAN] * 8], [7, 6, 5, 4, 3, 2, 1, 0, 0, 0],
    ),
    "DeepSpeed, some_overflow": (WINDOW, [INF, NAN, 0.1, 0.0, 0.1, INF], [7, 6, 6, 7, 7, 6]),
    # Here a clean step does not refill it.
    "DeepSpeed, consecutive_hysteresis": (
        {"init_scale": 2.0**8, "hysteresis": 2}, [INF, 0.1] * 4, [8, 8, 7, 7, 6, 6, 5, 5],
    ),
    # It raises; here the trainer stops, after some skips in a row.
    "fairseq, at the floor": ({"init_scale": 4.0, "min_scale": 2.0}, [INF] * 3, [1, 1, 1]),
    "Accelerate, test_grad_scaler_kwargs: what is not given is as torch has it": (
        {"init_scale": 1024.0, "growth_factor": 4.0},
        [*[1.0] * TORCHS.get_growth_interval(), INF],
        [*[10] * (TORCHS.get_growth_interval() - 1), 12, 12 + log2(TORCHS.get_backoff_factor())],
    ),
}  # fmt: skip


@each("name", SCALERS)
def test_scales(name: str) -> None:
    """What was counted survives a checkpoint, too."""
    rule, amaxes, exponents = SCALERS[name]
    scaler, scales = Backoff(**rule), []
    for amax in amaxes:
        scaler.update(torch.tensor(amax))
        scales.append(scaler.scale.item())
        last, scaler = scaler, Backoff(**rule)
        scaler.load_state_dict(last.state_dict())
    assert scales == [2.0**exponent for exponent in exponents]


@each("mode", ["amp", "mixed"])
@each("without", [torch.no_grad, torch.inference_mode])
def test_lightning_forward_without_gradients_first(without: Any, mode: str) -> None:
    """Lightning, test_amp_with_no_grad and _inference_mode: a cast kept from there is not reused.

    torch.autocast's own cache gives a weight without gradient afterwards; Lightning works round it.
    """
    model, precision, x = nn.Linear(2, 1), Precision(mode, "bfloat16"), torch.randn(3, 2)
    precision.prepare(model, SGD(model.parameters(), lr=0.1))
    with precision.cast():
        with without():
            model(x)
        loss = model(x).mean()
    loss.backward()
    assert model.weight.grad.any()


@each(("size", "windows"), [(4, 3), (3, 1)])
def test_iter_size(size: int, windows: int) -> None:
    """OpenSeq2Seq, optimizers_test, updates: nothing moves within a window, then by the mean of its
    gradients 2 X'(Xw - y) / n. There, three micro-batches in a window of six move by half of it.
    """
    torch.manual_seed(0)
    inputs, targets = torch.rand(10, 5), torch.rand(10, 1)
    model = nn.Linear(5, 1, bias=False)
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1))
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


# apex.amp, whose O1 is our `amp`.


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
    for dtype in (torch.float32, half):
        x = torch.rand(8, 8).to(dtype).requires_grad_()
        with amp.cast():
            y = function(x)
        y.float().sum().backward()
        assert (y.dtype, x.grad.dtype) == (
            {"half": half, "fp32": torch.float32}.get(rule, dtype),
            dtype,
        )
