"""Which modules must stay in fp32: found by measuring what each of them does to the gradients.

The same search finds which modules must stay in half where products are computed below 16 bits. In
what follows fp32 is then half, and half is the recipe of the products.

In comparison with fp32, with the same weights, batches and random numbers,

    E(P) = max( |g - g_0| / |g_0|, |L - L_0| / |L_0| )

is the relative error of the gradients of all weights, and of the loss, if the modules P are pinned
to fp32 and all others are in half. A value that is not finite counts as an
infinite error. A module's own error is E with every other module in fp32 and its inputs rounded to
half.

The smallest set is searched greedily: modules whose own error is above the target are pinned, then
the next worst until E(P) reaches it; then each pin that is not needed is removed, the smallest
error first. That is one trial for each module and a few more, not one for each set of modules.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.callback import Batch
from mpframe.core.handlers import cast_to
from mpframe.core.loss_scaling.scaler import safe_scale
from mpframe.training.trainer import Trainer

Pins = Mapping[str, str]
Maker = Callable[[Pins, str | None], Trainer]
"""Builds a fresh trainer, always with the same weights: in half with these modules pinned; with
one op alone in half if it is named."""


@dataclass(frozen=True)
class RelativeError:
    """How far a step in half is from the same step in fp32: relative, inf if not finite."""

    loss: float
    gradients: float

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max(self.loss, self.gradients)


@dataclass(frozen=True)
class Sensitivity:
    """A module, or an op, and the error that it causes alone."""

    name: str
    kind: str
    error: RelativeError


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        target: the error to reach.
        scale: the loss scale of all trials in half.
        all_half: the error with nothing in fp32.
        modules, ops: ranked, the worst first.
        trail: the sets that were tried, with their errors.
        pinned: the smallest set found, in the model's order.
        reached: its error.
    """

    target: float
    scale: float
    all_half: RelativeError
    modules: tuple[Sensitivity, ...]
    ops: tuple[Sensitivity, ...]
    trail: tuple[tuple[tuple[str, ...], RelativeError], ...]
    pinned: tuple[str, ...]
    reached: RelativeError


class Search:
    """Searches the modules that must stay in fp32, or whose products must stay in half.

    Args:
        reference: a fresh trainer in fp32, with the weights that every trial starts from.
        make: builds the trainers of the trials.
        batches: one or more, all trials see the same.
        target: relative error to reach, > 0.
        progress: called with a name after each trial.
        pin: what keeps a module: `fp32`, or `none` for products in half.
        modules: what may be pinned; None: every module without children.
    """

    def __init__(
        self,
        reference: Trainer,
        make: Maker,
        batches: Sequence[Batch],
        target: float,
        progress: Callable[[str], None] = lambda name: None,
        pin: str = "fp32",
        modules: Sequence[str] | None = None,
    ) -> None:
        self._make = make
        self._batches = batches
        self._target = target
        self._progress = progress
        self._pin = pin
        self._modules = _candidates(reference.model) if modules is None else list(modules)
        self._loss, self._gradients = _step(reference, batches, 1.0)
        self._scale = _scale(self._gradients, reference.precision.policy.half_dtype)
        self._trail: list[tuple[tuple[str, ...], RelativeError]] = []

    def run(self, ops: Sequence[str] = ()) -> SearchResult:
        """Search; rank these ops beside the modules."""
        all_half = self._with(())
        modules = sorted(map(self._sensitivity, self._modules), key=_badness, reverse=True)
        ranked = sorted(map(self._op_alone, ops), key=_badness, reverse=True)
        pinned, reached = self._pruned(*self._reached(modules))
        ordered = tuple(name for name in self._modules if name in pinned)
        return SearchResult(
            self._target,
            self._scale,
            all_half,
            tuple(modules),
            tuple(ranked),
            tuple(self._trail),
            ordered,
            reached,
        )

    def _reached(self, ranked: Sequence[Sensitivity]) -> tuple[list[str], RelativeError]:
        """Pins in the order of the ranking until the target is reached, or all are pinned."""
        pinned = [own.name for own in ranked if own.error.worst > self._target]
        error = self._with(pinned)
        for own in ranked[len(pinned) :]:
            if error.worst <= self._target:
                break
            pinned.append(own.name)
            error = self._with(pinned)
        return pinned, error

    def _pruned(self, pinned: list[str], error: RelativeError) -> tuple[list[str], RelativeError]:
        """Without the pins that the target does not need, the smallest error tried first."""
        for name in reversed(pinned):
            fewer = [other for other in pinned if other != name]
            without = self._with(fewer)
            if without.worst <= self._target:
                pinned, error = fewer, without
        return pinned, error

    def _with(self, pinned: Sequence[str]) -> RelativeError:
        """E(P)."""
        names = tuple(sorted(pinned))
        for known, error in self._trail:
            if known == names:
                return error
        error = self._error(self._make(dict.fromkeys(names, self._pin), None))
        self._trail.append((names, error))
        self._progress(f"{len(names)} modules pinned")
        return error

    def _sensitivity(self, name: str) -> Sensitivity:
        """A module alone in half."""
        others = [other for other in self._modules if other != name]
        trainer = self._make(dict.fromkeys(others, self._pin), None)
        module = trainer.model.get_submodule(name)
        with _half_inputs(module, trainer.precision.policy.half_dtype):
            error = self._error(trainer)
        self._progress(name)
        return Sensitivity(name, type(module).__name__, error)

    def _op_alone(self, op: str) -> Sensitivity:
        error = self._error(self._make({}, op))
        self._progress(op)
        return Sensitivity(op, "op", error)

    def _error(self, trainer: Trainer) -> RelativeError:
        loss, gradients = _step(trainer, self._batches, self._scale)
        own = [gradients[name] for name in self._gradients]
        away = _norm([g - g0 for g, g0 in zip(own, self._gradients.values(), strict=True)])
        return RelativeError(
            _relative(abs(loss - self._loss), abs(self._loss)),
            _relative(away, _norm(list(self._gradients.values()))),
        )


def _badness(sensitivity: Sensitivity) -> float:
    return sensitivity.error.worst


def _candidates(model: nn.Module) -> list[str]:
    """Modules without children, by name: what can be pinned one by one."""
    return [name for name, module in model.named_modules() if name and not list(module.children())]


def _step(
    trainer: Trainer, batches: Sequence[Batch], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """The summed loss and gradients of some batches: float64, on the CPU, unscaled."""
    torch.manual_seed(0)  # Dropout and noise are the same in every trial.
    trainer.model.train()
    total = 0.0
    sums: dict[str, Tensor] = {}
    for batch in batches:
        total += trainer.backward(batch, scale)
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach().to_dense().double().cpu() / scale
                sums[name] = sums[name] + gradient if name in sums else gradient
            parameter.grad = None
    return total, sums


def _scale(gradients: Mapping[str, Tensor], half: torch.dtype) -> float:
    """The largest power of two, up to 2^16, that leaves an octave free above every gradient."""
    amax = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    return min(2.0**16, safe_scale(amax, half) or 1.0)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _relative(away: float, size: float) -> float:
    if not math.isfinite(away):
        return math.inf
    return away / size if size else float(away > 0)


@contextmanager
def _half_inputs(module: nn.Module, half: torch.dtype) -> Iterator[None]:
    """Within the block the module's inputs are rounded to half, as a half neighbour's would be."""

    def round_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_to((args, kwargs), half)

    handle = module.register_forward_pre_hook(round_inputs, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
