"""torch's GradScaler, case by case: gradients given by hand, beside the real one over fp32 weights.

Ours is `Backoff` with the same numbers and `MasterWeights`, over fp32 weights and over half ones,
whose gradients are rounded to half. Scales are powers of two, so equal means torch.equal.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from ported import scales_after
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW
from vocabulary import INF, NAN

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError

FORMATS = ("fp32", "float16", "bfloat16")
RULES: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}
Make = Callable[[Any], torch.optim.Optimizer]
differs, each = pytest.mark.differs, pytest.mark.parametrize


class Twins:
    """The same weights twice: ours in a storage format, and torch's in fp32."""

    def __init__(
        self, kept: str, make: Make = lambda p: SGD(p, lr=0.5), scale: float = 2.0**7, **rules: Any
    ) -> None:
        rules = {**RULES, **rules}
        precision = Precision("fp32") if kept == "fp32" else Precision("mixed", kept)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.twin = copy.deepcopy(self.model)
        self.model, self.optimizer = precision.prepare(self.model, make(self.model.parameters()))
        self.reference = make(self.twin.parameters())
        self.pairs = [*zip(self.model.parameters(), self.twin.parameters(), strict=True)]
        self.scaler = Backoff(init_scale=scale, max_scale=2.0**100, min_scale=2.0**-100, **rules)
        self.grad_scaler = GradScaler("cpu", init_scale=scale, **rules)
        self.grad_scaler.scale(torch.ones(()))  # It makes its state when it is first used.

    def give(self, gradients: Sequence[Tensor], *, spoil: float | None = None, at: int = 0) -> None:
        """Leave what a backward pass of the scaled loss leaves; `spoil` lands in parameter `at`."""
        for index, ((ours, theirs), own) in enumerate(zip(self.pairs, gradients, strict=True)):
            scaled = own * self.scaler.scale
            if spoil is not None and index == at:
                scaled[0] = spoil
            ours.grad = scaled.to(ours.dtype)
            theirs.grad = ours.grad.to(torch.float32, copy=True)

    def step(self, max_norm: float | None = None) -> bool:
        """One step of both; whether ours was skipped."""
        if max_norm is not None:
            self.grad_scaler.unscale_(self.reference)
            nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm)
        self.grad_scaler.step(self.reference)
        self.grad_scaler.update()
        result = self.optimizer.step(self.scaler, max_norm=max_norm)
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        return bool(result.skipped)

    def agree(self) -> bool:
        """Weights, masters and scale are the same on both sides."""
        return self.scaler.scale.item() == self.grad_scaler.get_scale() and all(
            torch.equal(self.optimizer.master_of(p), t) and torch.equal(p, t.to(p.dtype))
            for p, t in self.pairs
        )

    def train(self, bad_steps: Sequence[bool], bad: float = INF, **options: Any) -> None:
        """Steps, of which the bad ones are skipped; after each both sides agree."""
        for step, spoilt in enumerate(bad_steps):
            self.give(gradients(step), spoil=bad if spoilt else None, at=step % 2)
            assert self.step(**options) == spoilt
            assert self.agree()


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (3,))]


def test_the_scale_grows_after_an_interval_and_falls_on_overflow() -> None:
    """torch's rule, step by step: doubled after two clean steps, a quarter after an overflow."""
    scales = scales_after(Backoff(init_scale=4.0, **RULES), (1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0))
    assert scales == [4.0, 8.0, 2.0, 2.0, 1.0, 1.0, 2.0]  # 0.5 is below the default floor of 1


@each("verdicts", ["....", ".x..", "xx..", "..x.x...", "......x."])
@each("interval", [1, 2, 3])
def test_scales_beside_torch(verdicts: str, interval: int) -> None:
    """torch's growth tracker: an overflow starts the count anew, growth does, too."""
    Twins("fp32", growth_interval=interval).train([verdict == "x" for verdict in verdicts])


def test_the_scale_never_becomes_infinite() -> None:
    """torch's rule: a product that is not finite is not taken."""
    rule: Any = {"init_scale": 2.0**126, "growth_factor": 16.0, "growth_interval": 1}
    theirs = GradScaler("cpu", **rule)
    theirs.scale(torch.ones(()))
    torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, torch.zeros(()), 16.0, 0.5, 1)
    ours = scales_after(Backoff(max_scale=2.0**127, **rule), [1.0] * 3)
    assert (theirs.get_scale(), ours) == (2.0**126, [2.0**126] * 3)


ANY = differs("torch takes any scale; here it must be a positive, finite float32")
FACTORS = [("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_factor", 0.5)]
SCALES = [pytest.param("init_scale", scale, marks=ANY) for scale in (0.0, -1.0, INF, NAN)]


@each(("name", "value"), [*FACTORS, *SCALES])
def test_senseless_numbers_are_refused(name: str, value: float) -> None:
    """torch asserts growth_factor > 1 and backoff_factor < 1, and takes any scale."""
    with nullcontext() if name == "init_scale" else pytest.raises(AssertionError):
        GradScaler("cpu", **{name: value})
    with pytest.raises(ConfigError, match=rf"loss_scaling\.{name}"):
        Backoff(**{name: value})


def assert_skips_if_bad(gradients: list[Tensor], where: int, bad: float | None) -> None:
    """A step of SGD at scale 4 with gradients of 4, one maybe spoilt, skips or takes 1 from all."""
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    if bad is not None:
        gradients[where][2, 2] = bad
    result = MasterWeights(SGD(weights, lr=1.0)).step(Static(4.0))
    moved = -1.0 if bad is None else 0.0
    assert all(torch.equal(w, torch.full_like(w, moved)) for w in weights)
    assert bool(result.skipped) == (bad is not None)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "transposed": lambda g: g.t(),
    "sliced": lambda g: g[:, :5],
}


@each("bad", [None, INF, NAN])
@each("layout", LAYOUTS)
@each("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_unscaling_gradients_of_every_layout(layout: str, bad: float | None, kept: Any) -> None:
    """torch: gradients of 4 at scale 4 are exactly 1; one inf or nan anywhere is found."""
    gradient = LAYOUTS[layout](torch.full((20, 20), 4.0, dtype=kept))
    assert_skips_if_bad([gradient.clone(), gradient], 1, bad)


@each("where", [None, *range(4)])
def test_an_inf_is_found_in_any_of_many_formats(where: int | None) -> None:
    """torch's perfect storm: fp32 and half gradients, contiguous and not, in one optimizer."""
    g = torch.full((20, 20), 4.0)
    storm = [g.clone(), g.clone()[:, :5], g.half(), g.bfloat16()]
    assert_skips_if_bad(storm, where or 0, None if where is None else INF)


@differs("torch refuses to unscale half gradients; here they are unscaled in fp32")
def test_half_gradients() -> None:
    """torch raises where it meets one: 2^-14 / 2^14 is 0 in half."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = GradScaler("cpu", init_scale=2.0**14)
    weight.grad = scaler.scale(torch.full((2,), 2.0**-28)).half()
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(SGD([weight], lr=1.0))
    optimizer = MasterWeights(SGD([weight], lr=1.0))
    optimizer.step(Static(2.0**14))
    assert torch.equal(optimizer.master_of(weight), torch.full((2,), -(2.0**-28)))


ADDED = differs("torch adds duplicates in half and finds inf; here they are added in fp32")
ONCE, TWICE = [[0, 1, 1], [2, 0, 2]], [[0, 1, 0], [2, 0, 2]]
SPARSE = [
    *product([ONCE], [[16.0, 32.0, last] for last in (64.0, INF, NAN)], ["float32", "float16"]),
    pytest.param(TWICE, [64000.0, 32.0, 64000.0], "float16", marks=ADDED),
]


@each(("places", "values", "kept"), SPARSE)
def test_sparse_gradients(places: list[list[int]], values: list[float], kept: str) -> None:
    """torch: each at scale 4 in its place; an inf or nan is found, 64000 twice is an overflow."""
    own = torch.tensor(values, dtype=getattr(torch, kept))
    weight = nn.Parameter(torch.zeros(2, 3, dtype=own.dtype))
    weight.grad = torch.sparse_coo_tensor(places, own, (2, 3), check_invariants=False)
    result = MasterWeights(SGD([weight], lr=2.0**-10)).step(Static(4.0))
    bad = not own.isfinite().all()
    moved = torch.zeros(2, 3).index_put(tuple(torch.tensor(places)), own.float(), accumulate=True)
    wanted = torch.zeros(2, 3) if bad else -(2.0**-12) * moved
    assert (bool(result.skipped), weight.tolist()) == (bad, wanted.tolist())
    assert bad or result.amax == moved.max() / 4


@differs("torch raises where no gradient was found; here nothing moves and amax is 0")
def test_a_step_without_gradients() -> None:
    """torch: no inf checks were recorded for this optimizer."""
    twins = Twins("fp32")
    with pytest.raises(AssertionError, match="No inf checks"):
        twins.grad_scaler.step(twins.reference)
    assert twins.optimizer.step(twins.scaler).amax == 0


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
@each("kept", FORMATS)
@each("spoilt", [None, 0, 2])
@each("name", OPTIMIZERS)
def test_training_with_one_bad_step(name: str, spoilt: int | None, kept: str) -> None:
    """torch: the step with an inf is skipped, the others are those of training without scaling.

    A fused optimizer of torch multiplies by the inverse of the scale inside its kernel: by a power
    of two, so exactly.
    """
    Twins(kept, OPTIMIZERS[name]).train([step == spoilt for step in range(5)])


@pytest.mark.usefixtures("waited_for")
@differs("torch's fused SGD keeps a momentum that its skipped first step never wrote")
@each("kept", FORMATS)
def test_fused_momentum_after_a_bad_first_step(kept: str) -> None:
    """torch: the kernel of a skipped step returns early, over momentum that was only allocated."""
    fused, plain = (
        Twins(kept, lambda p, f=f: SGD(p, lr=0.5, momentum=0.5, fused=f)) for f in (True, None)
    )
    for step in range(4):
        for twins in (fused, plain):
            twins.give(gradients(step), spoil=INF if step == 0 else None)
            twins.optimizer.step(twins.scaler)
    # Nearly: the fused kernel may multiply and add in one rounding, a unit in the last place.
    for (ours, _), (theirs, _) in zip(fused.pairs, plain.pairs, strict=True):
        masters = fused.optimizer.master_of(ours), plain.optimizer.master_of(theirs)
        assert torch.allclose(*masters, rtol=2.0**-20, atol=2.0**-20)


@each("kept", FORMATS)
@each("spoilt", [None, 1])
def test_clipping(spoilt: int | None, kept: str) -> None:
    """torch: unscale_, then clip_grad_norm_, then step; an inf still skips."""
    Twins(kept).train([step == spoilt for step in range(4)], NAN, max_norm=0.5)


@each("scale", [2.0**4, 2.0**10])
def test_disabled_is_the_same_as_never_there(scale: float) -> None:
    """torch: with enabled=False the run is that of the bare optimizer; here scaler=None."""
    twins, off = Twins("fp32", scale=scale), GradScaler("cpu", enabled=False)
    for step in range(3):
        for (ours, theirs), gradient in zip(twins.pairs, gradients(step), strict=True):
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        twins.optimizer.step()
        off.step(twins.reference)
        off.update()
        assert all(torch.equal(ours, theirs) for ours, theirs in twins.pairs)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(8, size, generator=generator) for size in (4, 3))
    return nn.functional.mse_loss(model(inputs), targets)


@each("spoilt", [None, 1])
def test_gradient_penalty(spoilt: int | None) -> None:
    """torch: scaled gradients are taken with a graph, unscaled by hand, and their norm added."""

    def penalised(model: nn.Module, step: int, scale: Tensor) -> Tensor:
        loss = loss_of(model, step)
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
        assert twins.agree()
