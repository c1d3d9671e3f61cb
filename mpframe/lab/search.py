"""Finds which modules must stay in fp32 by measuring what each of them does to the gradients.

With products below 16 bits it finds which modules must stay in half: read half for fp32, and the
recipe of the products for half. Compared with fp32, with the same weights, batches and random
numbers,

    E(P) = max( |g - g_0| / |g_0|, |L - L_0| / |L_0| )

is the relative error of the gradients of all weights, and of the loss, if the modules P are pinned
to fp32 and all others are in half. It is infinite for a value that is not finite. A module's own
error is E with every other module in fp32 and its inputs rounded to half.

The search for the smallest set is greedy. Modules whose own error is above the target are pinned,
then the next worst until E(P) reaches it. Then each pin that is not needed is removed, the smallest
error first. That is one trial for each module and a few more, not one for each set of modules.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.callback import Batch
from mpframe.precision.handlers import cast_to
from mpframe.training.probe import safe_scale
from mpframe.training.trainer import Trainer

Pins = Mapping[str, str]
Maker = Callable[[Pins, str | None], Trainer]
"""Builds a fresh trainer, always with the same weights: in half with these modules pinned, or with
only the op that is named in half."""


@dataclass(frozen=True)
class RelativeError:
    """How far a step in half is from the same step in fp32: relative, inf if not finite."""

    loss: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradients)


@dataclass(frozen=True)
class Sensitivity:
    """A module, or an op, and the error that it causes by itself."""

    name: str
    kind: str  # its class, or `op`
    error: RelativeError


@dataclass(frozen=True)
class SearchResult:
    target: float  # the error to reach
    scale: float  # the loss scale of all trials in half
    all_half: RelativeError  # with nothing in fp32
    modules: Sequence[Sensitivity]  # ranked, the worst first
    ops: Sequence[Sensitivity]  # ranked, the worst first
    trail: Mapping[tuple[str, ...], RelativeError]  # the sets that were tried
    pinned: Sequence[str]  # the smallest set found, in the model's order
    reached: RelativeError  # its error


@dataclass
class Search:
    """A search for the modules that must stay in fp32, or whose products must stay in half."""

    reference: Trainer  # fresh, in fp32, with the weights that every trial starts from
    make: Maker  # builds the trainers of the trials
    batches: Sequence[Batch]  # one or more, the same for all trials
    target: float  # relative error to reach, > 0
    progress: Callable[[str], None] = lambda name: None  # called with a name after each trial
    pin: str = "fp32"  # or `none` for products in half
    modules: Sequence[str] | None = None  # that may be pinned, by default each without children

    def __post_init__(self) -> None:
        named = self.reference.model.named_modules()
        leaves = [name for name, module in named if name and not list(module.children())]
        self._modules = leaves if self.modules is None else list(self.modules)
        self._loss, self._gradients = _step(self.reference, self.batches, 1.0)
        # The largest power of two, up to 2^16, that leaves an octave free above every gradient.
        amaxes = (float(g.abs().max()) for g in self._gradients.values() if g.numel())
        half = self.reference.precision.policy.half_dtype
        self._scale = min(2.0**16, safe_scale(max(amaxes, default=0.0), half) or 1.0)
        self._trail: dict[tuple[str, ...], RelativeError] = {}

    def run(self, ops: Sequence[str] = ()) -> SearchResult:
        """Search, and rank these ops beside the modules."""
        all_half = self._with(())
        modules = _rank(map(self._try_module, self._modules))
        alone = _rank(Sensitivity(op, "op", self._error(self.make({}, op), op)) for op in ops)
        pinned, reached = self._prune(*self._reach_target(modules))
        ordered = tuple(name for name in self._modules if name in pinned)
        evidence = (all_half, modules, alone, self._trail)
        return SearchResult(self.target, self._scale, *evidence, ordered, reached)

    def _reach_target(self, ranked: Sequence[Sensitivity]) -> tuple[list[str], RelativeError]:
        """Pin in the order of the ranking until the target is reached, or all are pinned."""
        pinned = [module.name for module in ranked if module.error.worst > self.target]
        error = self._with(pinned)
        for module in ranked[len(pinned) :]:
            if error.worst <= self.target:
                break
            pinned.append(module.name)
            error = self._with(pinned)
        return pinned, error

    def _prune(self, pinned: list[str], error: RelativeError) -> tuple[list[str], RelativeError]:
        """Remove the pins that the target does not need, trying the smallest error first."""
        for name in reversed(pinned):
            fewer = [other for other in pinned if other != name]
            without = self._with(fewer)
            if without.worst <= self.target:
                pinned, error = fewer, without
        return pinned, error

    def _with(self, pinned: Sequence[str]) -> RelativeError:
        """Measure E(P), once for each set."""
        names = tuple(sorted(pinned))
        if names not in self._trail:
            trainer = self.make(dict.fromkeys(names, self.pin), None)
            self._trail[names] = self._error(trainer, f"{len(names)} modules pinned")
        return self._trail[names]

    def _try_module(self, name: str) -> Sensitivity:
        others = [other for other in self._modules if other != name]
        trainer = self.make(dict.fromkeys(others, self.pin), None)
        module, half = trainer.model.get_submodule(name), trainer.precision.policy.half_dtype

        def round_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:  # as a half neighbour would
            return cast_to((args, kwargs), half)

        module.register_forward_pre_hook(round_inputs, with_kwargs=True)
        return Sensitivity(name, type(module).__name__, self._error(trainer, name))

    def _error(self, trainer: Trainer, tried: str) -> RelativeError:
        loss, gradients = _step(trainer, self.batches, self._scale)
        self.progress(tried)
        away = _norm(gradients[name] - exact for name, exact in self._gradients.items())
        return RelativeError(
            _relative(abs(loss - self._loss), abs(self._loss)),
            _relative(away, _norm(self._gradients.values())),
        )


def _step(
    trainer: Trainer, batches: Sequence[Batch], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Sum the loss and gradients of some batches: float64, on the CPU, unscaled."""
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


def _rank(trials: Iterable[Sensitivity]) -> list[Sensitivity]:
    return sorted(trials, key=lambda trial: trial.error.worst, reverse=True)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _relative(away: float, size: float) -> float:
    if not math.isfinite(away):
        return math.inf
    return away / size if size else float(away > 0)
