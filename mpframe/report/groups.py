"""Runs that differ only in the seed, and how each such group compares with fp32.

A group's numbers are means over its finished runs; the spread is from the lowest to the highest.
Its fp32 counterpart is every finished fp32 run with the same options, except those of dtype, loss
scaling and ops. That of a group with products below 16 bits is every finished run without them and
with the same options, except ops.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpframe.config.schema import only_watches
from mpframe.report.records import Record
from mpframe.tracking.summary import Summary

PRECISION = ("dtype", "loss_scaling", "ops")
PRODUCTS, RECIPES = "dtype.products", "dtype.recipes"
NO_RECIPE = "none"
_OF_PRODUCTS = (PRODUCTS, RECIPES, "ops.")
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
        in_half: likewise, of a group with a recipe for its products.
    """

    differing: tuple[str, ...]
    runs: Sequence[Record]
    fp32: Sequence[Record] = ()
    in_half: Sequence[Record] = ()

    @property
    def label(self) -> str:
        """Mode, scaling and differing options in one line."""
        return " · ".join([self.runs[0].mode, self.runs[0].scaling, *self.differing])

    @property
    def products(self) -> str:
        """The recipe for products below 16 bits, or `none`."""
        return str(self.runs[0].options.get(PRODUCTS, NO_RECIPE))

    def span(self, value: Callable[[Summary], float | None]) -> Span | None:
        """The span of a number over the finished runs."""
        return _span(self.runs, value)

    def beside(
        self, value: Callable[[Summary], float | None], others: Sequence[Record]
    ) -> tuple[Span, Span] | None:
        """(of this group, of others, as its counterpart); None if either is unknown."""
        own, full = _span(self.runs, value), _span(others, value)
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
        RunGroup(
            tuple(_words(runs[0], keys)),
            runs,
            _fp32_of(runs[0], records, keys),
            _in_half_of(runs[0], records, keys),
        )
        for runs in ordered
    ]


def _differing(records: Sequence[Record]) -> list[str]:
    """The options that are not the same in all runs.

    If some runs chose another class for a section (another `_target_`), an option that only one
    class has is not counted as a difference; nor are the values of a recipe that only some chose.
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
    chosen = f"{path.split('.')[0]}._target_"
    if path.startswith(RECIPES):
        chosen = PRODUCTS
    return len({str(options.get(chosen)) for options in known}) > 1


def _words(record: Record, keys: Sequence[str]) -> list[str]:
    own = record.options
    return [f"{key}={_typed(own[key])}" for key in keys if key in own]


def _typed(value: object) -> str:
    """A value as it is typed on a command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _fp32_of(record: Record, records: Sequence[Record], keys: Sequence[str]) -> tuple[Record, ...]:
    alike = _alike(record, records, [key for key in keys if key.split(".")[0] not in PRECISION])
    return tuple(run for run in alike if run.mode == "fp32")


def _in_half_of(
    record: Record, records: Sequence[Record], keys: Sequence[str]
) -> tuple[Record, ...]:
    alike = _alike(record, records, [key for key in keys if not key.startswith(_OF_PRODUCTS)])
    how = (record.mode, record.scaling)
    return tuple(
        run
        for run in alike
        if (run.mode, run.scaling) == how and run.options.get(PRODUCTS, NO_RECIPE) == NO_RECIPE
    )


def _alike(record: Record, records: Sequence[Record], keys: Sequence[str]) -> list[Record]:
    """The finished runs that have the record's values of these options."""
    own = _words(record, keys)
    return [run for run in records if run.finished and _words(run, keys) == own]


def _span(runs: Iterable[Record], value: Callable[[Summary], float | None]) -> Span | None:
    return Span.of(value(run.summary) for run in runs if run.finished and run.summary)
