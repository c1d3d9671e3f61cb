"""torch's GradScaler, case by case, beside the real one.

Each case is a list of steps with gradients given by hand, or a small model. The reference is
torch.amp.GradScaler("cpu") around the plain optimizer over fp32 weights; ours is `Backoff` with the
same numbers and `MasterWeights`, over fp32 weights and over half ones, whose gradients are rounded
to half. Scales are powers of two, so equal means torch.equal.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

INF, NAN = float("inf"), float("nan")
FORMATS = ("fp32", "float16", "bfloat16")
FOREVER = 2**30
RULES: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2}


class Twins:
    """The same weights twice: ours in a storage format, and torch's in fp32."""

    def __init__(
        self,
        kept: str,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.5),
        scale: float = 2.0**7,
        **rules: Any,
    ) -> None:
        rules = {**RULES, **rules}
        precision = Precision("fp32") if kept == "fp32" else Precision("mixed", kept)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.twin = copy.deepcopy(self.model)
        self.model, self.optimizer = precision.prepare(self.model, make(self.model.parameters()))
        self.reference = make(self.twin.parameters())
        self.scaler = Backoff(init_scale=scale, max_scale=2.0**100, min_scale=2.0**-100, **rules)
        self.grad_scaler = GradScaler("cpu", init_scale=scale, **rules)
        self.grad_scaler.scale(torch.ones(()))  # It makes its state when it is first used.

    def give(self, gradients: Sequence[Tensor], *, spoil: float | None = None, at: int = 0) -> None:
        """Leave what a backward pass of the scaled loss leaves; `spoil` lands in parameter `at`."""
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        for index, ((ours, theirs), gradient) in enumerate(zip(pairs, gradients, strict=True)):
            scaled = gradient * self.scaler.scale
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
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return self.scaler.scale.item() == self.grad_scaler.get_scale() and all(
            torch.equal(self.optimizer.master_of(p), t) and torch.equal(p, t.to(p.dtype))
            for p, t in pairs
        )


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((3, 4), (3,))]


# torch: the scale's update by itself.


def test_the_scale_grows_after_an_interval_and_falls_on_overflow() -> None:
    """torch's rule, step by step: 4, 4, 8 after two clean steps, 2 after an overflow."""
    scaler = Backoff(init_scale=4.0, **RULES)
    seen = []
    for amax in (1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0):
        scaler.update(torch.tensor(amax))
        seen.append(scaler.scale.item())
    assert seen == [4.0, 8.0, 2.0, 2.0, 1.0, 1.0, 2.0]  # 0.5 is below the default floor of 1


@pytest.mark.parametrize("verdicts", ["....", ".x..", "xx..", "..x.x...", "......x."])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_scales_beside_torch(verdicts: str, interval: int) -> None:
    """torch's growth tracker: an overflow starts the count anew, growth does, too."""
    twins = Twins("fp32", growth_interval=interval)
    for step, verdict in enumerate(verdicts):
        twins.give(gradients(step), spoil=INF if verdict == "x" else None)
        assert twins.step() == (verdict == "x")
        assert twins.agree()


def test_the_scale_never_becomes_infinite() -> None:
    """torch stops growing at the last finite scale; so do we, at max_scale."""
    limit = 2.0**127
    scaler = Backoff(
        init_scale=2.0**126, growth_factor=16.0, growth_interval=1, max_scale=limit, min_scale=1.0
    )
    for _ in range(3):
        scaler.update(torch.tensor(1.0))
        assert scaler.scale.isfinite()


@pytest.mark.differs("a growth beyond the ceiling ends there; torch leaves it out")
def test_growth_into_the_ceiling() -> None:
    """torch's rule: a product that is not finite is not taken."""
    rules: dict[str, Any] = {"growth_factor": 16.0, "backoff_factor": 0.5, "growth_interval": 1}
    theirs = GradScaler("cpu", init_scale=2.0**126, **rules)
    theirs.scale(torch.ones(()))
    theirs._scale, _ = (
        theirs._scale,
        torch._amp_update_scale_(  # type: ignore[attr-defined]
            theirs._scale, theirs._growth_tracker, torch.zeros(()), 16.0, 0.5, 1
        ),
    )
    ours = Backoff(init_scale=2.0**126, max_scale=2.0**127, **rules)
    ours.update(torch.tensor(1.0))
    assert (theirs.get_scale(), ours.scale.item()) == (2.0**126, 2.0**127)


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_factor", 0.5)]
)
def test_senseless_factors_are_refused(name: str, value: float) -> None:
    """torch asserts growth_factor > 1 and backoff_factor < 1."""
    with pytest.raises(AssertionError):
        GradScaler("cpu", **{name: value})
    with pytest.raises(ConfigError, match=rf"loss_scaling\.{name}"):
        Backoff(**{name: value})


@pytest.mark.differs("torch takes any scale; here it must be a positive, finite float32")
@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN])
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
    for scaler in (first, second):
        scaler.update(torch.tensor(1.0))
    assert first.scale == second.scale == 4.0


# torch: unscaling and the search for inf and nan.

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "transposed": lambda g: g.t(),
    "sliced": lambda g: g[:, :5],
}


@pytest.mark.parametrize("bad", [None, INF, NAN])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_unscaling_gradients_of_every_layout(
    layout: str, bad: float | None, kept: torch.dtype
) -> None:
    """torch: gradients of 4 at scale 4 are exactly 1; one inf or nan anywhere is found."""
    gradient = LAYOUTS[layout](torch.full((20, 20), 4.0, dtype=kept))
    weight, other = (nn.Parameter(torch.zeros_like(gradient)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD([other, weight], lr=1.0))
    other.grad, weight.grad = gradient.clone(), gradient
    if bad is not None:
        weight.grad[2, 2] = bad
    result = optimizer.step(Static(4.0))
    assert bool(result.skipped) == (bad is not None)
    moved = torch.zeros_like(weight) if bad is not None else -torch.ones_like(weight)
    assert torch.equal(weight, moved)
    assert torch.equal(other, moved)


@pytest.mark.parametrize("where", range(-1, 4))
def test_an_inf_is_found_in_any_of_many_formats(where: int) -> None:
    """torch's perfect storm: fp32 and half gradients, contiguous and not, in one optimizer."""
    g = torch.full((20, 20), 4.0)
    storm = [g.clone(), g.clone()[:, :5], g.half(), g.bfloat16()]
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in storm]
    for weight, gradient in zip(weights, storm, strict=True):
        weight.grad = gradient
    if where >= 0:
        storm[where][2, 2] = INF
    result = MasterWeights(torch.optim.SGD(weights, lr=1.0)).step(Static(4.0))
    assert bool(result.skipped) == (where >= 0)
    assert all(torch.equal(w, torch.full_like(w, 0.0 if where >= 0 else -1.0)) for w in weights)


@pytest.mark.differs("torch refuses to unscale half gradients; here they are unscaled in fp32")
def test_half_gradients() -> None:
    """torch raises where it meets one: 2^-14 / 2^14 is 0 in half."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = GradScaler("cpu", init_scale=2.0**14)
    weight.grad = scaler.scale(torch.full((2,), 2.0**-28)).half()
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(torch.optim.SGD([weight], lr=1.0))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    optimizer.step(Static(2.0**14))
    assert torch.equal(optimizer.master_of(weight), torch.full((2,), -(2.0**-28)))


@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_sparse_gradients(kept: torch.dtype, bad: float | None) -> None:
    """torch: 16, 32, 64 at scale 4, with two values in one place; an inf or nan is found."""
    where = torch.tensor([[0, 1, 1], [2, 0, 2]])
    values = torch.tensor([16.0, 32.0, 64.0 if bad is None else bad], dtype=kept)
    weight = nn.Parameter(torch.zeros(2, 3, dtype=kept))
    weight.grad = torch.sparse_coo_tensor(where, values, (2, 3), check_invariants=False)
    result = MasterWeights(torch.optim.SGD([weight], lr=1.0)).step(Static(4.0))
    assert bool(result.skipped) == (bad is not None)
    wanted = torch.zeros(2, 3, dtype=kept)
    if bad is None:
        wanted[0, 2], wanted[1, 0], wanted[1, 2] = -4.0, -8.0, -16.0
    assert torch.equal(weight, wanted)


@pytest.mark.differs("torch adds duplicates in half and finds inf; here they are added in fp32")
def test_sparse_duplicates_that_overflow_in_half() -> None:
    """torch: 64000 twice in one place is an overflow of float16."""
    where, values = torch.tensor([[0, 1, 0], [2, 0, 2]]), torch.tensor([64000.0, 32.0, 64000.0])
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    weight.grad = torch.sparse_coo_tensor(where, values.half(), (2, 3), check_invariants=False)
    result = MasterWeights(torch.optim.SGD([weight], lr=2.0**-10)).step(Static(4.0))
    assert not result.skipped
    assert result.amax == 32000.0
    assert weight[0, 2] == -31.25


@pytest.mark.differs("torch raises where no gradient was found; here nothing moves and amax is 0")
def test_a_step_without_gradients() -> None:
    """torch: no inf checks were recorded for this optimizer."""
    twins = Twins("fp32")
    twins.twin.zero_grad()
    with pytest.raises(AssertionError, match="No inf checks"):
        twins.grad_scaler.step(twins.reference)
    assert twins.optimizer.step(twins.scaler).amax == 0


# torch: whole training runs, with an inf planted in one of the steps.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adam, amsgrad, foreach": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


@pytest.mark.usefixtures("waited_for")
@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize("spoilt", [None, 0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_one_bad_step(name: str, spoilt: int | None, kept: str) -> None:
    """torch: the step with an inf is skipped, the others are those of training without scaling.

    A fused optimizer of torch multiplies by the inverse of the scale inside its kernel: by a power
    of two, so exactly.
    """
    twins = Twins(kept, OPTIMIZERS[name])
    for step in range(5):
        twins.give(gradients(step), spoil=INF if step == spoilt else None, at=step % 2)
        assert twins.step() == (step == spoilt)
        assert twins.agree()


@pytest.mark.usefixtures("waited_for")
@pytest.mark.differs("torch's fused SGD keeps a momentum that its skipped first step never wrote")
@pytest.mark.parametrize("kept", FORMATS)
def test_fused_momentum_after_a_bad_first_step(kept: str) -> None:
    """torch: the kernel of a skipped step returns early, over momentum that was only allocated."""
    fused = Twins(kept, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True))
    plain = Twins(kept, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5))
    for step in range(4):
        for twins in (fused, plain):
            twins.give(gradients(step), spoil=INF if step == 0 else None)
            twins.optimizer.step(twins.scaler)
    # Nearly: the fused kernel may multiply and add in one rounding, a unit in the last place.
    for ours, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        masters = fused.optimizer.master_of(ours), plain.optimizer.master_of(theirs)
        assert torch.allclose(*masters, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize("spoilt", [None, 1])
def test_clipping(spoilt: int | None, kept: str) -> None:
    """torch: unscale_, then clip_grad_norm_, then step; an inf still skips."""
    twins = Twins(kept)
    for step in range(4):
        twins.give(gradients(step), spoil=NAN if step == spoilt else None)
        assert twins.step(max_norm=0.5) == (step == spoilt)
        assert twins.agree()


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10])
def test_disabled_is_the_same_as_never_there(scale: float) -> None:
    """torch: with enabled=False the run is that of the bare optimizer; here scaler=None."""
    twins = Twins("fp32", scale=scale)
    off = GradScaler("cpu", enabled=False)
    for step in range(3):
        for ours, theirs, gradient in zip(
            twins.model.parameters(), twins.twin.parameters(), gradients(step), strict=True
        ):
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        twins.optimizer.step()
        off.step(twins.reference)
        off.update()
        for ours, theirs in zip(twins.model.parameters(), twins.twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("size", [2, 4])
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


@pytest.mark.parametrize("spoilt", [None, 1])
def test_gradient_penalty(spoilt: int | None) -> None:
    """torch: scaled gradients are taken with a graph, unscaled by hand, and their norm added."""

    def penalised(model: nn.Module, step: int, scale: Tensor) -> Tensor:
        loss = loss_of(model, step)
        parameters = list(model.parameters())
        scaled = torch.autograd.grad(loss * scale, parameters, create_graph=True)
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


@pytest.mark.parametrize("spoilt", [None, "first", "second"])
@pytest.mark.parametrize("kept", FORMATS)
def test_two_optimizers_with_one_scaler(spoilt: str | None, kept: str) -> None:
    """torch: only the optimizer with an inf in its gradients skips; the scale falls for both."""
    first, second = Twins(kept), Twins(kept, OPTIMIZERS["adam"])
    second.scaler, second.grad_scaler = first.scaler, first.grad_scaler
    joint = MultiOptimizer(
        {"first": first.optimizer, "second": second.optimizer}, skip="each", own_losses=True
    )
    for step in range(4):
        for name, twins in (("first", first), ("second", second)):
            spoil = INF if step == 1 and name == spoilt else None
            twins.give(gradients(step), spoil=spoil)
        for twins in (first, second):
            first.grad_scaler.step(twins.reference)
        first.grad_scaler.update()
        joint.step(first.scaler)
        assert first.agree()
        assert second.agree()
