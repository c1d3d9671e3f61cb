"""Turns of processes of their own, raced and made into a table."""

import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.child import run_python
from bench.measure import Competitor, race
from bench.step.competitors import MAX_NORM
from bench.step.laps import LAPS
from bench.step.one_turn import OneTurn
from bench.step.workloads import WORKLOADS, Workload
from bench.table import Table

BYTES = "peak bytes per parameter"
SLOW_ROUNDS = 2

Row = Mapping[str, Any]


class Turn:
    """Turns of one row.

    Args:
        row: its name.
        arguments: of `one_turn.measure`.

    Attributes:
        turns: what was measured so far.
    """

    def __init__(self, row: str, arguments: Row) -> None:
        self._row, self._arguments = row, json.dumps(arguments)
        self.turns: list[OneTurn] = []

    def __call__(self) -> float:
        """Seconds per step.

        Raises:
            MpframeError: the process failed.
        """
        words = ["-m", "bench.step.one_turn", self._arguments]
        printed = run_python(words, Path(tempfile.gettempdir()), f"bench: {self._row!r}")
        self.turns.append(OneTurn(**json.loads(printed)))
        return self.turns[-1].seconds


def race_turns(
    workload: str,
    sizes: Mapping[str, int],
    rows: Mapping[str, Row],
    rounds: int,
    threads: int,
    steps: int,
    slow: Collection[str] = (),
) -> Table:
    """A table of a workload: time, laps and memory of each row; the first is the baseline.

    Args:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        rows: the arguments of `one_turn.measure` that differ, by the row's name.
        rounds: measured rounds, >= 1.
        threads: that torch computes with.
        steps: per turn.
        slow: the rows that take part in the first two rounds only.
    """
    common = {"workload": workload, "sizes": dict(sizes), "threads": threads, "steps": steps}
    turns = {row: Turn(row, {**common, **own}) for row, own in rows.items()}
    # No warm-up: nothing of a process is left for the next.
    competitors = [
        Competitor(row, turn, SLOW_ROUNDS if row in slow else None) for row, turn in turns.items()
    ]
    times = race(competitors, rounds, warmup=0)
    work = WORKLOADS[workload](**sizes)
    details = {f"{lap}, ms": _laps(turns, lap) for lap in LAPS}
    details[BYTES] = {
        row: [t.bytes_per_parameter for t in turn.turns if t.bytes_per_parameter is not None]
        for row, turn in turns.items()
    }
    title = f"{work.title}, {_in_words(work.parameters)} parameters"
    return Table(title, _setting(work, threads), next(iter(rows)), times, details=details)


def _laps(turns: Mapping[str, Turn], lap: str) -> dict[str, list[float]]:
    return {row: [t.laps[lap] * 1e3 for t in turn.turns] for row, turn in turns.items()}


def _setting(work: Workload, threads: int) -> str:
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    return (
        f"{work.sizes}, fused AdamW, gradients clipped to {MAX_NORM}, {cores}; float16 with "
        "Backoff."
    )


def _in_words(count: int) -> str:
    return f"{count / 1e6:.0f} million" if count >= 1e6 else str(count)
