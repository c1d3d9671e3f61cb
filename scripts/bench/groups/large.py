"""Models with many parameters, in every dtype mode: time, where it goes, and memory.

With few products for each weight, the optimizer's step and its memory decide. mpframe keeps freed
memory, as `mpframe train` does; three rows show what that alone comes to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import Times, ratio
from bench.step.competitors import STEPS
from bench.step.turns import BYTES, race_turns
from bench.table import Claim, Table
from mpframe.core.policy import has_native_half

THREADS = 2
PLAIN = "torch fp32"
AUTOCAST = "torch.autocast bfloat16"

SIZES: dict[str, dict[str, int]] = {"linear": {}, "transformer": {}, "recommender": {}}
"""The models, each with its own sizes."""
ROWS: dict[str, dict[str, Any]] = {
    **{name: {"name": name, "keep_memory": name.startswith("mpframe")} for name in STEPS},
    **{f"{name}, memory kept": {"name": name, "keep_memory": True} for name in (PLAIN, AUTOCAST)},
    "mpframe mixed bfloat16, memory given back": {"name": "mpframe mixed bfloat16"},
}
"""Whose step it is, and whether freed memory is kept."""

_MIXED, _FLOAT16 = "mpframe mixed bfloat16", "mpframe mixed float16"
_AMP = ("mpframe amp bfloat16", AUTOCAST, 1.02)
_LINEAR = ((_FLOAT16, PLAIN, 1.4), (_MIXED, AUTOCAST, 0.9))
_MEMORY = ((_MIXED, 0.8), ("mpframe mixed bfloat16, split masters", 0.7))  # times AUTOCAST's


def tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Mapping[str, int]] = SIZES,
    rows: Sequence[str] = tuple(ROWS),
    threads: int = THREADS,
    steps: int = 5,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        workloads: the sizes of each, by its name.
        rows: who takes part.
        threads: that torch computes with.
        steps: per turn.
    """
    chosen = {row: ROWS[row] for row in rows}
    # Without instructions for bfloat16 a backward pass of torch's own takes 40 times as long.
    slow = () if has_native_half("bfloat16") else (AUTOCAST, f"{AUTOCAST}, memory kept")
    made = []
    for name, sizes in workloads.items():
        table = race_turns(name, sizes, chosen, rounds, threads, steps, slow)
        claims = claims_of(name, table.times, table.details[BYTES])
        made.append(replace(table, claims=claims))
    return made


def claims_of(workload: str, times: Times, memory: Times) -> list[Claim]:
    """What a ratio is to be, for those that took part; most is asked of the linear layers."""
    marks = [_AMP, *(_LINEAR if workload == "linear" else ())]
    native = has_native_half("bfloat16")
    claims = [
        Claim.between(times, name, other, most)
        for name, other, most in marks
        if name in times and (native or "bfloat16" not in name)
    ]
    sizes = [
        Claim(f"bytes per parameter, {name} / {AUTOCAST}", ratio(memory, name, AUTOCAST), most)
        for name, most in _MEMORY
        if workload == "linear" and memory.get(name)
    ]
    return claims + sizes
