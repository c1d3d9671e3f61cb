"""How the cost of a step grows: time against width, depth, batch and parameters, in `mixed`.

One size is varied, the others stay. The slope is that of log(time) over log(size): 0 if the size
costs nothing, 1 where the time grows as the size does, 2 as its square.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.measure import Competitor, Spread, Times, race, threads, timed
from bench.step.competitors import STEPS
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS
from bench.table import Table

THREADS = 2
WHO = "mpframe mixed bfloat16"


@dataclass(frozen=True)
class Growth:
    """One size that grows.

    Attributes:
        workload: one of `WORKLOADS`.
        size: its argument.
        values: of it.
        others: the other sizes.
    """

    workload: str
    size: str
    values: Sequence[int]
    others: Mapping[str, int]


_LINEAR = {"width": 512, "layers": 8, "batch": 32}
GROWTHS: dict[str, Growth] = {
    "width": Growth("linear", "width", (256, 512, 1024, 2048), _LINEAR),
    "depth": Growth("linear", "layers", (4, 8, 16, 32), _LINEAR),
    "batch": Growth("linear", "batch", (32, 128, 512, 2048), _LINEAR),
    "parameters": Growth("recommender", "rows", (4000, 16000, 64000, 256000), {"batch": 256}),
}
"""The last one has products for 256 rows alone, whatever the number of its weights."""


def tables(
    rounds: int, folder: Path, growths: Mapping[str, Growth] = GROWTHS, steps: int = 3
) -> list[Table]:
    """A table for each size that grows, with its slope.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        growths: what grows, by its name.
        steps: per turn.
    """
    with threads(THREADS):
        return [_table(name, growth, rounds, steps) for name, growth in growths.items()]


def slope(times: Times, sizes: Sequence[int]) -> Spread:
    """The slope of log(time) over log(size) in each round, by least squares.

    Args:
        times: of the steps, by name, in the order of `sizes`.
        sizes: at least two, all different.
    """
    rounds = np.log(np.array(list(times.values())))
    return Spread.of([float(s) for s in np.polyfit(np.log(sizes), rounds, deg=1)[0]])


def _table(name: str, growth: Growth, rounds: int, steps: int) -> Table:
    works = {
        f"{growth.size} {value}": WORKLOADS[growth.workload](
            **{**growth.others, growth.size: value}
        )
        for value in growth.values
    }
    turns = {row: timed(STEPS[WHO](work, Laps()), steps) for row, work in works.items()}
    times = race([Competitor(row, turn) for row, turn in turns.items()], rounds)
    found = slope(times, growth.values)
    first = next(iter(works))
    return Table(
        f"Growth with {name}",
        f"{WHO}; first row: {works[first].sizes}; fused AdamW, {THREADS} threads.",
        first,
        times,
        notes=[f"slope: {found.median:.2f} ({found.low:.2f} to {found.high:.2f})"],
    )
