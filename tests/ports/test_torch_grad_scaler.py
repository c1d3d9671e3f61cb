"""torch's GradScaler, case by case: gradients given by hand, beside the real one over fp32 weights.

Ours is `Backoff` with the same numbers and `MasterWeights`, over fp32 weights and over half ones,
whose gradients are rounded to half. Scales are powers of two, so equal means torch.equal.
"""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW
from vocabulary import INF, NAN

from mpframe import Backoff, MasterWeights, Precision, Static

RULES: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
Make = Callable[[Any], torch.optim.Optimizer]
differs, each = pytest.mark.differs, pytest.mark.parametrize


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


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    *(lambda g: g, lambda g: g.t(), lambda g: g[:, :5], lambda g: g.half(), lambda g: g.bfloat16()),
    *(lambda g: g.half().t(), lambda g: g.to_sparse(), lambda g: g.half().to_sparse()),
]


@each(("where", "bad"), [(-1, 4.0), *product(range(len(LAYOUTS)), (INF, NAN))])
def test_one_bad_value_is_found_in_a_gradient_of_any_layout_and_format(
    where: int, bad: float
) -> None:
    """torch's perfect storm: all in one optimizer. Gradients of 4 at scale 4 are exactly 1."""
    weights = []
    for index, layout in enumerate(LAYOUTS):
        gradient = torch.full((20, 20), 4.0)
        gradient[2, 2] = bad if index == where else 4.0
        gradient = layout(gradient)
        weights.append(nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)))
        weights[-1].grad = gradient
    result = MasterWeights(SGD(weights, lr=1.0)).step(Static(4.0))
    assert bool(result.skipped) == (where >= 0)
    moved = 0.0 if where >= 0 else -1.0
    assert all(torch.equal(w, torch.full_like(w, moved)) for w in weights)


@differs("torch adds duplicates in half and finds inf; here they are added in fp32")
def test_sparse_half_gradients_with_duplicates() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    values = torch.tensor([64000.0, 32.0, 64000.0]).half()
    weight.grad = torch.sparse_coo_tensor([[0, 1, 0], [2, 0, 2]], values, (2, 3))
    result = MasterWeights(SGD([weight], lr=2.0**-10)).step(Static(4.0))
    assert not result.skipped
    assert weight.tolist() == [[0.0, 0.0, -31.25], [-(2.0**-7), 0.0, 0.0]]


@differs("torch raises where no gradient was found; here nothing moves and amax is 0")
def test_a_step_without_gradients() -> None:
    twins = Twins("fp32")
    with pytest.raises(AssertionError, match="No inf checks"):
        twins.grad_scaler.step(twins.reference)
    assert twins.optimizer.step(twins.scaler).amax == 0


@each("spoilt", [None, 1])
def test_gradient_penalty(spoilt: int | None) -> None:
    """torch: scaled gradients are taken with a graph, unscaled by hand, and their norm added."""

    def penalised(model: nn.Module, step: int, scale: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randn(8, size, generator=generator) for size in (4, 3))
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaled = torch.autograd.grad(loss * scale, [*model.parameters()], create_graph=True)
        return loss + torch.stack([(g / scale).square().sum() for g in scaled]).sum().sqrt()

    twins = Twins("fp32")
    for step in range(3):
        scale = twins.scaler.scale
        (penalised(twins.model, step, scale) * scale).backward()
        twins.grad_scaler.scale(penalised(twins.twin, step, scale)).backward()
        for model in (twins.model, twins.twin) if step == spoilt else ():
            model.weight.grad[1, 1] = INF
        assert twins.step() == (step == spoilt)
