"""One model of the zoo in every mode, beside torch: a row of the result.

How far gradients may be from fp32 says README.md. Two computations whose roundings differ but are
as large are rarely more than a factor of 4 apart: their squared distances are sums over thousands
of roundings. float16 rounds 8 times as finely and is held to the same. A model whose gradients
leave float16 whatever the scale is no failure if torch.autocast in float16 says so, too.
"""

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from example import Example, NotBuiltError
from torch import Tensor, nn

from mpframe import Backoff, Precision

FACTOR = 4.0
MODES = {
    "fp32": ("fp32", "float16"),
    "amp float16": ("amp", "float16"),
    "amp bfloat16": ("amp", "bfloat16"),
    "mixed float16": ("mixed", "float16"),
    "mixed bfloat16": ("mixed", "bfloat16"),
}
RECOMPUTED = ("amp bfloat16", "mixed float16")
KEYS = (*MODES, "fp32 recomputed", *(f"{mode} recomputed" for mode in RECOMPUTED))
HEAD = ("model", "class", "verdict", "torch.autocast bfloat16", "allowed", *KEYS)
TRIES = 30  # Backoff starts at 2^16, and 2^24 steps down is further than any model needs


@dataclass
class Row:
    """What became of one model, whose name is library/model and whose kind is its class."""

    name: str
    kind: str = ""
    autocast: float | str = ""  # the distance under torch.autocast bfloat16, or why it raised
    allowed: float = 0.0  # how far from fp32 a mode may be
    # By mode, and `<mode> recomputed`, the distance, or why it raised.
    modes: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # what of that must not be
    built: str = ""  # why the model could not be built

    def line(self) -> dict[str, str]:
        """As it stands in zoo.csv."""
        verdict = f"not built: {self.built}" if self.built else "; ".join(self.failures) or "agrees"
        modes = [self.modes.get(key, "") for key in KEYS]
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
    sizes = [_distance_or_error(plain, example, change="round"), row.autocast]
    row.allowed = FACTOR * max([size for size in sizes if isinstance(size, float)], default=0.0)
    outcomes = {mode: _try(row, mode, example, plain) for mode in MODES}
    _judge(row, outcomes["fp32"], plain)
    if example.recompute is not None:
        _judge_recomputation(row, example, outcomes)
    return row


def train(example: Example, mode: str = "", autocast: Any = None, change: str = "") -> Outcome:
    """Steps of AdamW of a copy, by torch alone or in a mode, as a user's own loop takes them.

    change: `round` the weights to bfloat16 (how much does the model mind that?), or `recompute`
    with the model's own activation checkpointing. OverflowError: none of TRIES applied a step.
    """
    model: Any = copy.deepcopy(example.model)
    loss_of = partial(_seeded, example)
    if change == "recompute" and example.recompute is not None:
        example.recompute(model)
    if change == "round":
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


def _try(
    row: Row, mode: str, example: Example, plain: Outcome, recompute: bool = False
) -> Outcome | None:
    key = f"{mode} recomputed" if recompute else mode
    try:
        outcome = train(example, mode, change="recompute" if recompute else "")
    except OverflowError as error:
        row.modes[key] = f"{error}, under torch.autocast too"
        if train(example, autocast=torch.float16).compared.isfinite().all():
            row.failures.append(f"{key}: {error}, but not under torch.autocast")
        return None
    except Exception as error:
        row.modes[key] = repr(error)
        if isinstance(row.autocast, float):
            row.failures.append(f"{key}: {row.modes[key]}")
        return None
    row.modes[key] = _distance(outcome, plain)
    return outcome


def _judge(row: Row, exact: Outcome | None, plain: Outcome) -> None:
    if exact is not None and not _same(exact, plain):
        row.failures.append("fp32 is not bit for bit torch's")
    for mode, size in row.modes.items():
        if isinstance(size, float) and not size <= row.allowed:
            row.failures.append(f"{mode}: {size:.2g} from fp32, allowed {row.allowed:.2g}")


def _judge_recomputation(row: Row, example: Example, stored: dict[str, Outcome | None]) -> None:
    """Recomputed activations must give the same bits, where they do so in fp32."""
    plain = stored["fp32"]
    again = plain and _try(row, "fp32", example, plain, recompute=True)
    if plain is None or again is None or not _same(again, plain):
        return
    for mode in RECOMPUTED:
        outcome, kept = _try(row, mode, example, plain, recompute=True), stored[mode]
        if outcome is not None and kept is not None and not _same(outcome, kept):
            row.failures.append(f"{mode}: recomputed activations give other gradients")


def _same(a: Outcome, b: Outcome) -> bool:
    return a.losses == b.losses and torch.equal(a.compared, b.compared)


def _distance_or_error(plain: Outcome, example: Example, **how: Any) -> float | str:
    try:
        return _distance(train(example, **how), plain)
    except Exception as error:
        return repr(error)


def _distance(outcome: Outcome, plain: Outcome) -> float:
    return ((outcome.compared - plain.compared).norm() / plain.compared.norm()).item()
