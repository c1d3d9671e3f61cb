"""One model of the zoo in every mode, beside torch: a row of the result.

How far gradients may be from fp32 says README.md. Two computations whose roundings differ but are
as large are rarely more than a factor of 4 apart: their squared distances are sums over thousands
of roundings. float16 rounds 8 times as finely and is held to the same. A model whose gradients
leave float16 whatever the scale is no failure if torch.autocast in float16 says so, too.
"""

import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import training
from example import Example, NotBuiltError
from training import Outcome

FACTOR = 4.0
MODES = {
    "fp32": ("fp32", "float16"),
    "amp float16": ("amp", "float16"),
    "amp bfloat16": ("amp", "bfloat16"),
    "mixed float16": ("mixed", "float16"),
    "mixed bfloat16": ("mixed", "bfloat16"),
}
RECOMPUTED = ("amp bfloat16", "mixed float16")


@dataclass
class Row:
    """What became of one model.

    Attributes:
        name: library/model.
        kind: its class.
        autocast: distance under torch.autocast bfloat16, or why it raised.
        allowed: how far from fp32 a mode may be.
        modes: by mode, and `<mode> recomputed`, the distance, or why it raised.
        failures: what of that must not be.
        built: why the model could not be built.
    """

    name: str
    kind: str = ""
    autocast: float | str = ""
    allowed: float = 0.0
    modes: dict[str, float | str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    built: str = ""
    seconds: float = 0.0


def compare(name: str, example: Example) -> Row:
    """Train `example` in every mode and judge the outcomes."""
    start = time.monotonic()
    row = Row(name, type(example.model).__name__)
    plain = training.train_plain(example)
    if not (plain.gradients.isfinite().all() and plain.gradients.any()):
        raise NotBuiltError("its fp32 gradients are zero or not finite")
    row.autocast = _distance_or_error(plain, example, training.AUTOCAST)
    sizes = [_distance_or_error(plain, example, rounded=True), row.autocast]
    row.allowed = FACTOR * max([size for size in sizes if isinstance(size, float)], default=0.0)
    outcomes = {mode: _try(row, mode, example, plain) for mode in MODES}
    _judge(row, outcomes["fp32"], plain)
    if example.recompute is not None:
        _judge_recomputation(row, example, outcomes)
    row.seconds = time.monotonic() - start
    return row


def _try(
    row: Row, mode: str, example: Example, plain: Outcome, *, recompute: bool = False
) -> Outcome | None:
    key = f"{mode} recomputed" if recompute else mode
    try:
        outcome = training.train(example, *MODES[mode], recompute=recompute)
    except OverflowError as error:
        row.modes[key] = f"{error}, under torch.autocast too"
        if not training.overflows_under_autocast(example):
            row.failures.append(f"{key}: {error}, but not under torch.autocast")
        return None
    except Exception as error:
        row.modes[key] = _first_line(error)
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
    if plain is None:
        return
    again = _try(row, "fp32", example, plain, recompute=True)
    if again is None or not _same(again, plain):
        return
    for mode in RECOMPUTED:
        outcome, kept = _try(row, mode, example, plain, recompute=True), stored[mode]
        if outcome is not None and kept is not None and not _same(outcome, kept):
            row.failures.append(f"{mode}: recomputed activations give other gradients")


def _same(a: Outcome, b: Outcome) -> bool:
    return a.losses == b.losses and torch.equal(a.gradients, b.gradients)


def _distance_or_error(plain: Outcome, *given: Any, **named: Any) -> float | str:
    try:
        return _distance(training.train_plain(*given, **named), plain)
    except Exception as error:
        return _first_line(error)


def _distance(outcome: Outcome, plain: Outcome) -> float:
    off = (outcome.gradients - plain.gradients).norm() / plain.gradients.norm()
    return off.item()


def _first_line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(Path(where.filename).parts[-2:])
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]} ({place}:{where.lineno})"
