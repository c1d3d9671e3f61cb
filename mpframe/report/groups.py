"""Runs that differ only in the seed, and how each such group compares with fp32.

A group's numbers are means over its finished runs; the spread is from the lowest to the highest.
Its fp32 counterpart is every finished fp32 run with the same options, except those of dtype, loss
scaling and ops.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpframe.config.schema import only_watches
from mpframe.report.records import Record
from mpframe.tracking.summary import Summary

PRECISION = ("dtype", "loss_scaling", "ops")
SHOWN_APART = (
    *("dtype.mode", "dtype.half"),
    *("loss_scaling._target_", "loss_scaling.mode", "loss_scaling.half"),
)


@dataclass(frozen=True)
class Span:
    """The mean, the lowest and the highest of some numbers."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Iterable[float | None]) -> "Span | None":
        """The span of the numbers that are known; None if no number is known."""
        known = [float(number) for number in numbers if number is not None]
        if not known:
            return None
        return cls(math.fsum(known) / len(known), min(known), max(known), len(known))


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed.

    Attributes:
        differing: `option=value` words that other groups of its mode and scaling do not have.
        runs: all of them, finished or not.
        fp32: the finished runs to compare with; empty if there are none.
    """

    differing: tuple[str, ...]
    runs: Sequence[Record]
    fp32: Sequence[Record] = ()

    @property
    def label(self) -> str:
        """Mode, scaling and differing options in one line."""
        return " · ".join([self.runs[0].mode, self.runs[0].scaling, *self.differing])

    def span(self, value: Callable[[Summary], float | None]) -> Span | None:
        """The span of a number over the finished runs."""
        return _span(self.runs, value)

    def beside(self, value: Callable[[Summary], float | None]) -> tuple[Span, Span] | None:
        """(of this group, of its fp32 counterpart); None if either is unknown."""
        own, full = _span(self.runs, value), _span(self.fp32, value)
        return (own, full) if own and full else None


def compared(records: Sequence[Record]) -> list[RunGroup]:
    """The records by group, with their fp32 counterparts; fp32 comes first."""
    keys = _differing(records)
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        label = (record.mode, record.scaling, *_words(record, keys))
        groups.setdefault(label, []).append(record)
    ordered = sorted(groups.values(), key=lambda runs: runs[0].mode != "fp32")
    return [
        RunGroup(tuple(_words(runs[0], keys)), runs, _counterpart(runs[0], records, keys))
        for runs in ordered
    ]


def _differing(records: Sequence[Record]) -> list[str]:
    """The options that are not the same in all runs.

    If some runs chose another class for a section (another `_target_`), an option that only one
    class has is not counted as a difference.
    """
    known = [record.options for record in records if record.options]
    paths = dict.fromkeys(path for options in known for path in options)
    differing = []
    for path in paths:
        values = {str(options[path]) for options in known if path in options}
        lacking = any(path not in options for options in known)
        if len(values) > 1 or (lacking and not _another_choice(path, known)):
            differing.append(path)
    apart = {"seed", *SHOWN_APART}
    return [path for path in differing if path not in apart and not only_watches(path)]


def _another_choice(path: str, known: Sequence[Mapping[str, object]]) -> bool:
    section = path.split(".")[0]
    return len({str(options.get(f"{section}._target_")) for options in known}) > 1


def _words(record: Record, keys: Sequence[str]) -> list[str]:
    own = record.options
    return [f"{key}={_typed(own[key])}" for key in keys if key in own]


def _typed(value: object) -> str:
    """A value as it is typed on a command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _counterpart(
    record: Record, records: Sequence[Record], keys: Sequence[str]
) -> tuple[Record, ...]:
    plain = [key for key in keys if key.split(".")[0] not in PRECISION]
    own = _words(record, plain)
    return tuple(
        run for run in records if run.mode == "fp32" and run.finished and _words(run, plain) == own
    )


def _span(runs: Iterable[Record], value: Callable[[Summary], float | None]) -> Span | None:
    return Span.of(value(run.summary) for run in runs if run.finished and run.summary)
