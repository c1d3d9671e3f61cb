"""A model of the zoo and its losses, and what becomes of it in every mode, beside torch.

How far gradients may be from fp32 says README.md. Two computations whose roundings differ but are
as large are rarely more than a factor of 4 apart: their squared distances are sums over thousands
of roundings. float16 rounds 8 times as finely and is held to the same. A model whose gradients
leave float16 whatever the scale is no failure if torch.autocast in float16 says so, too.
"""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from vocabulary import tensors

from mpframe import Backoff, Precision

FACTOR = 4.0
MODES = {
    "fp32": ("fp32", "float16"),
    "amp float16": ("amp", "float16"),
    "amp bfloat16": ("amp", "bfloat16"),
    "mixed float16": ("mixed", "float16"),
    "mixed bfloat16": ("mixed", "bfloat16"),
}
HEAD = ("model", "class", "verdict", "torch.autocast bfloat16", "allowed", *MODES)
TRIES = 30  # Backoff starts at 2^16, and 2^24 steps down is further than any model needs


class NotBuiltError(Exception):
    """The zoo does not know how to make this model small, or what to feed it."""


@dataclass(frozen=True)
class Example:
    """A model at its smallest: fp32, with random weights, on the CPU.

    Attributes:
        loss: of (model, step), 0-d.
        steps: how many it takes.
        traced: whether `prepare` is given an example.
        after_step: called with the model behind every applied step.
    """

    model: nn.Module
    loss: Callable[[Any, int], Tensor]
    steps: int = 2
    traced: bool = False
    after_step: Callable[[Any], object] = lambda model: None


def called(model: nn.Module, /, *inputs: Any, **named: Any) -> Example:
    """Trained with the same inputs in each step."""
    return Example(model, lambda own, _: loss_of(own(*inputs, **named)))


def loss_of(outputs: Any) -> Tensor:
    """The outputs' own loss, or the sum of their mean squared distances to fixed noise.

    Noise, and not zero: behind a norm the mean square of the outputs is constant, and its gradient
    nothing but rounding errors.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    losses = [o for o in tensors(outputs) if o.requires_grad]
    if any(o.ndim for o in losses):
        random = torch.Generator().manual_seed(7)
        wanted = [torch.randn(o.shape, generator=random) for o in losses]
        losses = [(o.float() - w).square().mean() for o, w in zip(losses, wanted, strict=True)]
    return torch.stack([o.float() for o in losses]).sum()


def noise(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def images(size: int, *, channels: int = 3, count: int = 2) -> Tensor:
    return noise(count, channels, size, size, seed=1)


def row(**options: Any) -> dict[str, Any]:
    """The options as a dict: of a table, whose rows so stay short."""
    return options


@dataclass
class Row:
    """What became of one model, whose name is library/model and whose kind is its class."""

    name: str
    kind: str = ""
    autocast: float | str = ""  # the distance under torch.autocast bfloat16, or why it raised
    allowed: float = 0.0  # how far from fp32 a mode may be
    modes: dict[str, float | str] = field(default_factory=dict)  # the distance, or why it raised
    failures: list[str] = field(default_factory=list)  # what of that must not be
    built: str = ""  # why the model could not be built

    def line(self) -> dict[str, str]:
        """As it stands in zoo.csv."""
        verdict = f"not built: {self.built}" if self.built else "; ".join(self.failures) or "agrees"
        modes = [self.modes.get(mode, "") for mode in MODES]
        cells = [self.name, self.kind, verdict, self.autocast, self.allowed, *modes]
        shown = [cell if isinstance(cell, str) else f"{cell:.2g}" for cell in cells]
        return dict(zip(HEAD, shown, strict=True))


class Outcome(NamedTuple):
    """The unscaled loss of each step that was applied, and what is compared with other outcomes.

    That is the gradient of the first step, flat, fp32, unscaled, every parameter in order, zeros
    where one has none; of an example that takes more steps than two it is the losses.
    """

    losses: list[float]
    compared: Tensor


def compare(name: str, example: Example) -> Row:
    row = Row(name, type(example.model).__name__)
    plain = train(example)
    if not (plain.compared.isfinite().all() and plain.compared.any()):
        raise NotBuiltError("its fp32 gradients are zero or not finite")
    row.autocast = _distance_or_error(plain, example, autocast=torch.bfloat16)
    sizes = [_distance_or_error(plain, example, rounded=True), row.autocast]
    row.allowed = FACTOR * max([size for size in sizes if isinstance(size, float)], default=0.0)
    outcomes = {mode: _try(row, mode, example, plain) for mode in MODES}
    exact = outcomes["fp32"]
    if exact and not (exact.losses == plain.losses and torch.equal(exact.compared, plain.compared)):
        row.failures.append("fp32 is not bit for bit torch's")
    for mode, size in row.modes.items():
        if isinstance(size, float) and not size <= row.allowed:
            row.failures.append(f"{mode}: {size:.2g} from fp32, allowed {row.allowed:.2g}")
    return row


def train(example: Example, mode: str = "", autocast: Any = None, rounded: bool = False) -> Outcome:
    """Steps of AdamW of a copy, by torch alone or in a mode, as a user's own loop takes them.

    rounded: its weights to bfloat16; how much does the model mind that? OverflowError: none of
    TRIES applied a step.
    """
    model: Any = copy.deepcopy(example.model)
    loss_of = partial(_seeded, example)
    if rounded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    context: Any = partial(torch.autocast, "cpu", autocast) if autocast else nullcontext
    scaler = None
    if mode:
        kind, half = MODES[mode]
        precision = Precision(kind, half)
        model, optimizer = precision.prepare(model, optimizer, loss_of if example.traced else None)
        context = precision.cast
        scaler = Backoff() if half == "float16" and kind != "fp32" else None
    losses: list[float] = []
    gradients: list[Tensor] = []
    for _ in range(example.steps + TRIES):
        scale = torch.ones(()) if scaler is None else scaler.scale
        with context():
            loss = loss_of(model, len(losses))
        (loss * scale).backward()
        gradient = _flat(model, scale.item())
        skipped = getattr(optimizer.step(scaler), "skipped", False)
        optimizer.zero_grad()
        if not skipped:
            example.after_step(model)
            losses.append(loss.item())
            gradients.append(gradient)
        if len(losses) == example.steps:
            whole = torch.tensor(losses, dtype=torch.float64)
            return Outcome(losses, gradients[0] if example.steps == 2 else whole)
    raise OverflowError(f"beyond {half} at every scale")


def _seeded(example: Example, model: nn.Module, step: int = 0) -> Tensor:
    """The loss; whatever is random in the forward pass is so in the same way."""
    random.seed(step)
    numpy.random.seed(step)  # What transformers draws its masks from
    torch.manual_seed(step)
    return example.loss(model, step)


def _flat(model: nn.Module, scale: float) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return torch.cat([grad.float().flatten() / scale for grad in grads])


def _try(row: Row, mode: str, example: Example, plain: Outcome) -> Outcome | None:
    try:
        outcome = train(example, mode)
    except OverflowError as error:
        row.modes[mode] = f"{error}, under torch.autocast too"
        if train(example, autocast=torch.float16).compared.isfinite().all():
            row.failures.append(f"{mode}: {error}, but not under torch.autocast")
        return None
    except Exception as error:
        row.modes[mode] = repr(error)
        if isinstance(row.autocast, float):
            row.failures.append(f"{mode}: {row.modes[mode]}")
        return None
    row.modes[mode] = _distance(outcome, plain)
    return outcome


def _distance_or_error(plain: Outcome, example: Example, **how: Any) -> float | str:
    try:
        return _distance(train(example, **how), plain)
    except Exception as error:
        return repr(error)


def _distance(outcome: Outcome, plain: Outcome) -> float:
    return ((outcome.compared - plain.compared).norm() / plain.compared.norm()).item()
