"""Models with many parameters, in every dtype mode: time, where it goes, and memory.

With few products for each weight, the optimizer's step and its memory decide. Each turn is a
process of its own (step/one_turn.py). mpframe keeps freed memory, as `mpframe train` does; two rows
show what that alone comes to.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpframe.bench.child import run_python
from mpframe.bench.measure import Competitor, Times, race, ratio
from mpframe.bench.step.competitors import MAX_NORM, STEPS
from mpframe.bench.step.laps import LAPS
from mpframe.bench.step.one_turn import OneTurn
from mpframe.bench.step.workloads import WORKLOADS, Workload
from mpframe.bench.table import Claim, Table
from mpframe.precision.policy import has_native_half

THREADS = 2
PLAIN = "torch fp32"
AUTOCAST = "torch.autocast bfloat16"
BYTES = "peak bytes per parameter"

SIZES: dict[str, dict[str, int]] = {"linear": {}, "transformer": {}, "recommender": {}}
"""The models, each with its own sizes."""

ROWS: dict[str, tuple[str, bool]] = {
    **{name: (name, name.startswith("mpframe")) for name in STEPS},
    f"{PLAIN}, memory kept": (PLAIN, True),
    "mpframe mixed bfloat16, memory given back": ("mpframe mixed bfloat16", False),
}
"""Whose step it is, and whether freed memory is kept."""

_MIXED, _FLOAT16 = "mpframe mixed bfloat16", "mpframe mixed float16"
_AMP = ("mpframe amp bfloat16", AUTOCAST, 1.02)
_LINEAR = ((_FLOAT16, PLAIN, 1.4), (_MIXED, AUTOCAST, 0.9))
_MEMORY = 0.8  # times AUTOCAST's


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
    return [
        _table(workload, sizes, rows, rounds, threads, steps)
        for workload, sizes in workloads.items()
    ]


class Turn:
    """Turns of one competitor.

    Attributes:
        turns: what was measured so far.
    """

    def __init__(
        self, workload: str, sizes: Mapping[str, int], row: str, threads: int, steps: int
    ) -> None:
        self._row = row
        name, keep_memory = ROWS[row]
        self._request = json.dumps(
            {
                "workload": workload,
                "sizes": dict(sizes),
                "name": name,
                "threads": threads,
                "steps": steps,
                "keep_memory": keep_memory,
            }
        )
        self.turns: list[OneTurn] = []

    def __call__(self) -> float:
        """Seconds per step.

        Raises:
            MpframeError: the process failed.
        """
        arguments = ["-m", "mpframe.bench.step.one_turn", self._request]
        printed = run_python(arguments, Path(tempfile.gettempdir()), f"bench: {self._row!r}")
        self.turns.append(OneTurn(**json.loads(printed)))
        return self.turns[-1].seconds


def claims_of(workload: str, times: Times, memory: Times) -> list[Claim]:
    """What a ratio is to be, for those that took part; most is asked of the linear layers."""
    marks = [_AMP, *(_LINEAR if workload == "linear" else ())]
    native = has_native_half("bfloat16")
    claims = [
        Claim(f"{name} / {other}", ratio(times, name, other), most)
        for name, other, most in marks
        if name in times and (native or "bfloat16" not in name)
    ]
    if workload == "linear" and memory.get(_MIXED):
        text = f"bytes per parameter, {_MIXED} / {AUTOCAST}"
        claims.append(Claim(text, ratio(memory, _MIXED, AUTOCAST), _MEMORY))
    return claims


def _table(
    workload: str,
    sizes: Mapping[str, int],
    rows: Sequence[str],
    rounds: int,
    threads: int,
    steps: int,
) -> Table:
    turns = {row: Turn(workload, sizes, row, threads, steps) for row in rows}
    # No warm-up: nothing of a process is left for the next.
    times = race([Competitor(name, turn) for name, turn in turns.items()], rounds, warmup=0)
    work = WORKLOADS[workload](**sizes)
    details = {f"{lap}, ms": _laps(turns, lap) for lap in LAPS}
    details[BYTES] = {
        name: [t.bytes_per_parameter for t in turn.turns if t.bytes_per_parameter is not None]
        for name, turn in turns.items()
    }
    return Table(
        f"{work.title}, {_in_words(work.parameters)} parameters",
        _setting(work, threads),
        PLAIN,
        times,
        claims_of(workload, times, details[BYTES]),
        details=details,
    )


def _laps(turns: Mapping[str, Turn], lap: str) -> dict[str, list[float]]:
    return {name: [t.laps[lap] * 1e3 for t in turn.turns] for name, turn in turns.items()}


def _setting(work: Workload, threads: int) -> str:
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    return (
        f"{work.sizes}, fused AdamW, gradients clipped to {MAX_NORM}, {cores}; float16 with "
        "Backoff."
    )


def _in_words(count: int) -> str:
    return f"{count / 1e6:.0f} million" if count >= 1e6 else str(count)
