"""torch's GradScaler, case by case: gradients given by hand, beside the real one over fp32 weights.

Ours is `Backoff` with the same numbers and `MasterWeights`, over fp32 weights and over half ones,
whose gradients are rounded to half. Scales are powers of two, so equal means torch.equal.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW
from vocabulary import INF, NAN, scales_after

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

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


# torch: the scale's update by itself.


def test_the_scale_grows_after_an_interval_and_falls_on_overflow() -> None:
    """torch's rule, step by step: doubled after two clean steps, a quarter after an overflow."""
    scales = scales_after(Backoff(init_scale=4.0, **RULES), (1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0))
    assert scales == [4.0, 8.0, 2.0, 2.0, 1.0, 1.0, 2.0]  # 0.5 is below the default floor of 1


@each("verdicts", ["....", ".x..", "xx..", "..x.x...", "......x."])
@each("interval", [1, 2, 3])
def test_scales_beside_torch(verdicts: str, interval: int) -> None:
    """torch's growth tracker: an overflow starts the count anew, growth does, too."""
    Twins("fp32", growth_interval=interval).train([verdict == "x" for verdict in verdicts])


STEEP: dict[str, Any] = {"growth_factor": 16.0, "backoff_factor": 0.5, "growth_interval": 1}


def test_the_scale_never_becomes_infinite() -> None:
    """torch stops growing at the last finite scale; so do we, at max_scale."""
    scaler = Backoff(init_scale=2.0**126, max_scale=2.0**127, min_scale=1.0, **STEEP)
    assert all(scale < INF for scale in scales_after(scaler, [1.0] * 3))


@differs("a growth beyond the ceiling ends there; torch leaves it out")
def test_growth_into_the_ceiling() -> None:
    """torch's rule: a product that is not finite is not taken."""
    theirs = GradScaler("cpu", init_scale=2.0**126, **STEEP)
    theirs.scale(torch.ones(()))
    torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, torch.zeros(()), 16.0, 0.5, 1)
    ours = scales_after(Backoff(init_scale=2.0**126, max_scale=2.0**127, **STEEP), [1.0])
    assert (theirs.get_scale(), ours) == (2.0**126, [2.0**127])


FACTORS = [("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_factor", 0.5)]


@each(("name", "value"), FACTORS)
def test_senseless_factors_are_refused(name: str, value: float) -> None:
    """torch asserts growth_factor > 1 and backoff_factor < 1."""
    with pytest.raises(AssertionError):
        GradScaler("cpu", **{name: value})
    with pytest.raises(ConfigError, match=rf"loss_scaling\.{name}"):
        Backoff(**{name: value})


@differs("torch takes any scale; here it must be a positive, finite float32")
@each("scale", [0.0, -1.0, INF, NAN])
def test_senseless_scales(scale: float) -> None:
    """torch multiplies by whatever it was given."""
    GradScaler("cpu", init_scale=scale)
    with pytest.raises(ConfigError, match=r"loss_scaling\.init_scale"):
        Backoff(init_scale=scale)


def test_a_saved_scaler_goes_on() -> None:
    """torch: scale and growth tracker survive state_dict and load_state_dict."""
    first, second = Backoff(init_scale=2.0, **RULES), Backoff(init_scale=4.0, **RULES)
    first.update(torch.tensor(1.0))
    second.load_state_dict(first.state_dict())
    assert scales_after(first, [1.0]) == scales_after(second, [1.0]) == [4.0]


# torch: unscaling and the search for inf and nan.

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "transposed": lambda g: g.t(),
    "sliced": lambda g: g[:, :5],
}


def skips(weights: list[nn.Parameter], bad: bool, scale: float = 4.0) -> bool:
    """Whether a step of SGD with these gradients of 4 skips, or takes 1 from each weight."""
    result = MasterWeights(SGD(weights, lr=1.0)).step(Static(scale))
    assert all(torch.equal(w, torch.full_like(w, 0.0 if bad else -1.0)) for w in weights)
    return bool(result.skipped)


@each("bad", [None, INF, NAN])
@each("layout", LAYOUTS)
@each("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_unscaling_gradients_of_every_layout(layout: str, bad: float | None, kept: Any) -> None:
    """torch: gradients of 4 at scale 4 are exactly 1; one inf or nan anywhere is found."""
    gradient = LAYOUTS[layout](torch.full((20, 20), 4.0, dtype=kept))
    weight, other = (nn.Parameter(torch.zeros_like(gradient)) for _ in range(2))
    other.grad, weight.grad = gradient.clone(), gradient
    if bad is not None:
        weight.grad[2, 2] = bad
    assert skips([other, weight], bad is not None) == (bad is not None)


@each("where", range(-1, 4))
def test_an_inf_is_found_in_any_of_many_formats(where: int) -> None:
    """torch's perfect storm: fp32 and half gradients, contiguous and not, in one optimizer."""
    g = torch.full((20, 20), 4.0)
    storm = [g.clone(), g.clone()[:, :5], g.half(), g.bfloat16()]
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in storm]
    for weight, gradient in zip(weights, storm, strict=True):
        weight.grad = gradient
    if where >= 0:
        storm[where][2, 2] = INF
    assert skips(weights, where >= 0) == (where >= 0)


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


def sparse_weight(places: list[list[int]], values: list[float], kept: torch.dtype) -> nn.Parameter:
    weight, own = nn.Parameter(torch.zeros(2, 3, dtype=kept)), torch.tensor(values, dtype=kept)
    weight.grad = torch.sparse_coo_tensor(places, own, (2, 3), check_invariants=False)
    return weight


@each("kept", [torch.float32, torch.float16])
@each("bad", [None, INF, NAN])
def test_sparse_gradients(kept: torch.dtype, bad: float | None) -> None:
    """torch: 16, 32, 64 at scale 4, each in its place; an inf or nan is found."""
    last = 64.0 if bad is None else bad
    weight = sparse_weight([[0, 1, 1], [2, 0, 2]], [16.0, 32.0, last], kept)
    result = MasterWeights(SGD([weight], lr=1.0)).step(Static(4.0))
    assert bool(result.skipped) == (bad is not None)
    moved = [[0.0, 0.0, -4.0], [-8.0, 0.0, -16.0]]
    assert weight.tolist() == (moved if bad is None else [[0.0] * 3] * 2)


@differs("torch adds duplicates in half and finds inf; here they are added in fp32")
def test_sparse_duplicates_that_overflow_in_half() -> None:
    """torch: 64000 twice in one place is an overflow of float16."""
    places, values = [[0, 1, 0], [2, 0, 2]], [64000.0, 32.0, 64000.0]
    weight = sparse_weight(places, values, torch.float16)
    result = MasterWeights(SGD([weight], lr=2.0**-10)).step(Static(4.0))
    assert (bool(result.skipped), result.amax, weight[0, 2]) == (False, 32000.0, -31.25)


@differs("torch raises where no gradient was found; here nothing moves and amax is 0")
def test_a_step_without_gradients() -> None:
    """torch: no inf checks were recorded for this optimizer."""
    twins = Twins("fp32")
    with pytest.raises(AssertionError, match="No inf checks"):
        twins.grad_scaler.step(twins.reference)
    assert twins.optimizer.step(twins.scaler).amax == 0


# torch: whole training runs, with an inf planted in one of the steps.

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


@each("size", [2, 4])
def test_accumulation(size: int) -> None:
    """torch: losses divided by the window's size, one step for each window.

    A power of two, so that dividing the losses and taking the mean of the gradients is the same.
    """
    twins = Twins("fp32")
    for step in range(3 * size):
        (loss_of(twins.model, step) * twins.scaler.scale).backward()
        twins.optimizer.accumulate(twins.scaler.scale)
        twins.grad_scaler.scale(loss_of(twins.twin, step) / size).backward()
        if step % size == size - 1:
            twins.step()
            assert twins.agree()


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
        if step == spoilt:
            for model in (twins.model, twins.twin):
                model.weight.grad[1, 1] = INF
        assert twins.step() == (step == spoilt)
        assert twins.agree()


@each("spoilt", [None, "first", "second"])
@each("kept", FORMATS)
def test_two_optimizers_with_one_scaler(spoilt: str | None, kept: str) -> None:
    """torch: only the optimizer with an inf in its gradients skips; the scale falls for both."""
    both = {"first": Twins(kept), "second": Twins(kept, OPTIMIZERS["adam"])}
    scaler, theirs = both["first"].scaler, both["first"].grad_scaler
    both["second"].scaler, both["second"].grad_scaler = scaler, theirs
    parts = {name: twins.optimizer for name, twins in both.items()}
    joint = MultiOptimizer(parts, skip="each", own_losses=True)
    for step in range(4):
        for name, twins in both.items():
            twins.give(gradients(step), spoil=INF if step == 1 and name == spoilt else None)
        for twins in both.values():
            theirs.step(twins.reference)
        theirs.update()
        joint.step(scaler)
        assert all(twins.agree() for twins in both.values())
