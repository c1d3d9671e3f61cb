"""Measured numbers, as Markdown for people and JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from bench.measure import Spread, Times, ratio


@dataclass(frozen=True)
class Claim:
    """A ratio and the most it may be."""

    text: str  # what is compared with what
    ratio: Spread  # as measured
    limit: float  # the largest median with which the claim holds

    @classmethod
    def between(cls, times: Times, name: str, other: str, limit: float, what: str = "") -> Self:
        """That `name` takes at most `limit` times as long as `other`. `what` ends the text."""
        return cls(f"{name} / {other}{what}", ratio(times, name, other), limit)

    @property
    def holds(self) -> bool:
        """Whether the median is within the limit."""
        return self.ratio.median <= self.limit

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        return f"{self.text}: {_spread(self.ratio)}, at most {self.limit:.3g}: {verdict}"


@dataclass(frozen=True)
class Table:
    """One comparison."""

    title: str  # what is compared
    setting: str  # what all competitors have in common: sizes, optimizer, threads
    baseline: str  # the competitor the others are divided by
    times: Times  # seconds per step of each round, by competitor
    claims: Sequence[Claim] = ()  # what the ratios are to be
    # Lines below the table: who was left out and why, further numbers.
    notes: Sequence[str] = field(default_factory=tuple)
    # Further columns by their heading: values of each round, by competitor, of which the median is
    # shown.
    details: Mapping[str, Times] = field(default_factory=dict)

    def markdown(self) -> str:
        """Heading, setting, one line per competitor, claims and notes."""
        ratios = f"ratio to {self.baseline} (quartiles)"
        titles = ["", "ms, median (quartiles)", ratios, "rounds", *self.details]
        head = [_row(titles), "|---" * len(titles) + "|"]
        lines = [_row([name, *self._cells(name)]) for name in self.times]
        below = [f"- {line}" for line in (*map(str, self.claims), *self.notes)]
        parts = [[f"## {self.title}"], [self.setting], [*head, *lines] if lines else [], below]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Everything, the single times included, for JSON."""
        return {
            **asdict(self),
            "times": {name: list(values) for name, values in self.times.items()},
            "ratios": {name: asdict(self._ratio(name)) for name in self.times},
            "claims": [{**asdict(claim), "holds": claim.holds} for claim in self.claims],
        }

    def _cells(self, name: str) -> list[str]:
        milliseconds = Spread.of([seconds * 1e3 for seconds in self.times[name]])
        ratios = "1" if name == self.baseline else _spread(self._ratio(name))
        medians = [_median(values[name]) for values in self.details.values()]
        return [_spread(milliseconds), ratios, str(milliseconds.count), *medians]

    def _ratio(self, name: str) -> Spread:
        return ratio(self.times, name, self.baseline)


def as_markdown(machine: Mapping[str, str], tables: Sequence[Table]) -> str:
    """The machine and the tables of one group."""
    described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    return "\n".join([described, "", *(table.markdown() for table in tables)])


def as_json(machine: Mapping[str, str], tables: Sequence[Table]) -> str:
    """The machine and the tables of one group."""
    content = {"machine": dict(machine), "tables": [table.as_dict() for table in tables]}
    return json.dumps(content, indent=1) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _median(values: Sequence[float]) -> str:
    return _three(Spread.of(values).median) if values else ""


def _spread(spread: Spread) -> str:
    return f"{_three(spread.median)} ({_three(spread.low)} to {_three(spread.high)})"


def _three(value: float) -> str:
    """Three significant digits: what a noisy machine can carry."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"
