"""Measuring on a machine that others use too: competitors take turns, ratios are taken in a round.

The same loop may take twice the time one minute later. So all competitors run in one process, one
short turn each per round, in a random order, and what is compared is

    r_i = t_i(competitor) / t_i(baseline)        the times of one round i, seconds apart

A burst of somebody else's work spoils the few rounds it falls into. The median and the quartiles
over many rounds hardly move.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch

Clock = Callable[[], float]
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Competitor:
    """One of those that are compared."""

    name: str  # stands in the table
    turn: Callable[[], float]  # runs one turn and returns the seconds it took per step
    # Takes part only in the first so many rounds, and in no warm-up: for the very slow.
    rounds: int | None = None


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high, len(values))


def race(competitors: Sequence[Competitor], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Make all take turns.

    Args:
        competitors: with different names.
        rounds: measured rounds, >= 1.
        warmup: rounds before them that do not count.

    Returns:
        Seconds per step of each round, by the competitor's name.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {competitor.name: [] for competitor in competitors}
    with _quick_collections():
        for number in range(-warmup, rounds):
            # Shuffled: none is always the one that finds the same competitor's warm caches.
            for competitor in order.sample(list(competitors), len(competitors)):
                if competitor.rounds is not None and not 0 <= number < competitor.rounds:
                    continue
                gc.collect()
                seconds = competitor.turn()
                if number >= 0:
                    times[competitor.name].append(seconds)
    return times


def ratio(times: Times, name: str, baseline: str) -> Spread:
    """`name` over `baseline`, within each round that both took part in."""
    pairs = zip(times[name], times[baseline], strict=False)
    return Spread.of([one / other for one, other in pairs])


def timed(step: Callable[[], Any], steps: int = 1, clock: Clock = time.perf_counter) -> Any:
    """A turn of `steps` calls of `step`, for a `Competitor`."""

    def turn() -> float:
        start = clock()
        for _ in range(steps):
            step()
        return (clock() - start) / steps

    return turn


class Stopwatch:
    """Batches that note the time when the next one is asked for, by any loop.

    Neither the time before the first batch and after the last counts, nor the first `skipped`
    steps.

    Args:
        batches: of a pass, at least `skipped` + 2.
        skipped: steps at the start of a pass that do not count.
        clock: seconds.

    Attributes:
        waited: 0, for `Curves`: the batches are there.
    """

    waited = 0.0

    def __init__(
        self, batches: Sequence[Any], skipped: int = 0, clock: Clock = time.perf_counter
    ) -> None:
        self._batches = batches
        self._skipped = skipped
        self._clock = clock
        self._asked: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._asked = []
        for batch in self._batches:
            self._asked.append(self._clock())
            yield batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The same pass, for `Trainer.fit`."""
        return iter(self)

    @property
    def seconds(self) -> float:
        """Seconds per step of the last pass."""
        counted = self._asked[self._skipped :]
        return (counted[-1] - counted[0]) / (len(counted) - 1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Keep all older objects from the garbage collector within the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
