"""Groups of runs that differ only in the seed, and the report's tables as plain text cells.

A group's numbers are means over its finished runs. The spread is from the lowest to the highest.
Its fp32 counterpart is every finished fp32 run with the same options, except dtype, loss scaling
and ops.

The second line of a cell is less important: options, a spread, a ratio. A column of empty cells is
left out. No table has more columns than fit on a page of 800 pixels.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

from mpframe.config.check import as_typed
from mpframe.config.schema import only_watches
from mpframe.lab.report.records import Record
from mpframe.tracking.summary import Summary

PRECISION = ("dtype", "loss_scaling", "ops")
PRODUCTS, RECIPES = "dtype.products", "dtype.recipes"
SHOWN_APART = (
    *("seed", "dtype.mode", "dtype.half"),
    *("loss_scaling._target_", "loss_scaling.mode", "loss_scaling.half"),
)
PARALLEL = "trainer.parallel"
"""It changes time and memory, and sums in the last bits."""
_CLASS = re.compile(r"\._target_=.*\.")

Number = Callable[[Summary], float | None]


@dataclass(frozen=True)
class Span:
    """The mean, the lowest and the highest of some numbers."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, runs: Iterable[Record], value: Number) -> "Span | None":
        """Return the span of the values that are known of finished runs, if any is."""
        values = [value(run.summary) for run in runs if run.finished and run.summary]
        known = [float(number) for number in values if number is not None]
        count = len(known)
        return cls(math.fsum(known) / count, min(known), max(known), count) if known else None


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed."""

    differing: tuple[str, ...]  # `option=value` words that its mode's other groups do not have
    runs: Sequence[Record]  # finished or not
    fp32: Sequence[Record] = ()  # the runs to compare with

    @property
    def label(self) -> str:
        return " · ".join([self.runs[0].mode, self.runs[0].scaling, *self.differing])

    def span(self, value: Number) -> Span | None:
        return Span.of(self.runs, value)

    def beside_fp32(self, value: Number) -> tuple[Span, Span] | None:
        """Return the spans of this group and of its fp32 runs, if both are known."""
        mine, full = Span.of(self.runs, value), Span.of(self.fp32, value)
        return (mine, full) if mine and full else None


def group_runs(records: Sequence[Record]) -> list[RunGroup]:
    """Group the records, with their fp32 counterparts, fp32 first."""
    keys = _find_differing(records)
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        label = (record.mode, record.scaling, *_words(record, keys))
        groups.setdefault(label, []).append(record)
    names = _shorten({word for record in records for word in _words(record, keys)})
    made = []
    for first, *others in sorted(groups.values(), key=lambda runs: runs[0].mode != "fp32"):
        words = tuple(names[word] for word in _words(first, keys))
        made.append(RunGroup(words, [first, *others], _fp32_of(first, records, keys)))
    return made


def _find_differing(records: Sequence[Record]) -> list[str]:
    """Return the options that are not the same in all runs.

    An option that only one class of a section has, or a recipe that only some runs chose, is no
    difference: the choice is.
    """
    known = [record.options for record in records if record.options]
    paths = dict.fromkeys(path for options in known for path in options)
    differing = []
    for path in paths:
        values = {str(options[path]) for options in known if path in options}
        lacking = any(path not in options for options in known)
        if len(values) > 1 or (lacking and not _another_choice(path, known)):
            differing.append(path)
    shown = [path for path in differing if path == PARALLEL or not only_watches(path)]
    return [path for path in shown if path not in SHOWN_APART]


def _another_choice(path: str, known: Sequence[Mapping[str, object]]) -> bool:
    chosen = f"{path.split('.')[0]}._target_"
    if path.startswith(RECIPES):
        chosen = PRODUCTS
    return len({str(options.get(chosen)) for options in known}) > 1


def _words(record: Record, keys: Sequence[str]) -> list[str]:
    return [f"{key}={as_typed(record.options[key])}" for key in keys if key in record.options]


def _shorten(words: Collection[str]) -> dict[str, str]:
    """Return each word with the last name of its class, `model=Net`, unless two share that."""
    short = {word: _CLASS.sub("=", word) for word in words}
    count = Counter(short.values())
    return {word: own if count[own] == 1 else word for word, own in short.items()}


def _fp32_of(record: Record, records: Sequence[Record], keys: Sequence[str]) -> list[Record]:
    kept = [key for key in keys if key.split(".")[0] not in PRECISION]
    words = _words(record, kept)
    alike = [run for run in records if run.mode == "fp32" and _words(run, kept) == words]
    fp32 = sorted(alike, key=attrgetter("finished"))
    plain = [key for key in keys if not key.startswith("loss_scaling")]  # It changes no number.
    return [*{(r.options.get("seed", r.name), *_words(r, plain)): r for r in fp32}.values()]


Table = list[list[str]]
_LEAST_SEEDS = 3
NOTES = (
    "Numbers are means over the n finished runs of a group, then the lowest and the highest. The "
    "gap is relative to the fp32 runs with otherwise equal options, each counted once "
    "whatever its loss scaling. A gap smaller than the spread of the fp32 runs means nothing, and "
    "fewer than three seeds or no spread tell nothing. If all finished runs were tested, metric "
    "and gap are of the test; best and val loss are of the validation.",
)
COST_NOTES = (
    "The time of a step is the median. Samples / s are for the whole run: its training "
    "samples over its training time, without validation and saving. Ratios are relative to the "
    "fp32 runs with otherwise equal options.",
    "Memory is what torch allocated at most on a CUDA device. On a CPU it is the peak of the whole "
    "process, which all jobs of a sweep share: there only its growth is meaningful.",
)
EMULATED = "float16 was emulated on a CPU: these times say nothing about a GPU."


class Section(NamedTuple):
    title: str
    table: Table  # the head first
    notes: Sequence[str] = ()


def sections(groups: Sequence[RunGroup]) -> list[Section]:
    """Return the sections that have a table, in the order of the page."""
    runs = [run for group in groups for run in group.runs]
    cast = [r.summary for r in runs if r.summary and r.options.get("dtype.compute") != "native"]
    emulated = any((done.half, done.device) == ("float16", "cpu") for done in cast)
    every = [
        Section("Results", results(groups), NOTES),
        Section("Speed and memory", costs(groups), [*COST_NOTES, *[EMULATED] * emulated]),
        Section("Every run", every_run(groups)),
    ]
    return [section for section in every if section.table]


def results(groups: Sequence[RunGroup]) -> Table:
    """Tabulate what was learnt, a row for each group."""
    metrics = {run.summary.metric for group in groups for run in group.runs if run.summary}
    known = sorted(name for name in metrics if name)
    metric = known[0] if len(known) == 1 else "metric"
    finished = [run.summary for group in groups for run in group.runs if run.finished]
    tested = bool(finished) and all(done and done.test_metric is not None for done in finished)
    value = attrgetter("test_metric" if tested else "val_metric")
    columns: _Columns = {
        "precision, scaling": _label,
        "n": _count,
        f"test {metric}" if tested else metric: lambda g: _spread(g.span(value), ".4f"),
        "best": lambda g: _spread(g.span(attrgetter("best")), ".4f"),
        "gap to fp32": lambda g: _gap(g, value),
        "val loss": lambda g: _spread(g.span(attrgetter("val_loss")), ".4g"),
    }
    return _tabulate(groups, columns)


def costs(groups: Sequence[RunGroup]) -> Table:
    """Tabulate what it took, a row for each group."""
    columns: _Columns = {
        "precision, scaling": _label,
        "step, ms": lambda g: _beside_fp32(g, attrgetter("median_step_seconds"), ".3g", 1e3),
        "samples / s": lambda g: _beside_fp32(g, attrgetter("samples_per_second")),
        "memory, MiB": lambda g: _beside_fp32(g, attrgetter("peak_memory_bytes"), times=2.0**-20),
        "skipped": lambda g: _spread(g.span(attrgetter("skipped_steps")), ".4g"),
        "final scale": _final_scales,
    }
    return _tabulate(groups, columns)


_Columns = Mapping[str, Callable[[RunGroup], str]]


def _tabulate(groups: Sequence[RunGroup], columns: _Columns) -> Table:
    rows = [[cell(group) for cell in columns.values()] for group in groups]
    return _without_empty([[*columns], *rows])


def every_run(groups: Sequence[RunGroup]) -> Table:
    head = ["run", "precision, scaling", "status", "steps", "metric", "val loss", "seconds"]
    rows = [
        [_name_run(run), _label(group), _lines(run.status, run.reason), *_numbers(run.summary)]
        for group in groups
        for run in group.runs
    ]
    return _without_empty([head, *rows])


def _label(group: RunGroup) -> str:
    first = group.runs[0]
    return _lines(f"{first.mode}, {first.scaling}", " ".join(group.differing))


def _name_run(run: Record) -> str:
    done = run.summary
    seed = done.seed if done else run.options.get("seed", "unknown")
    where = [done.device, f"torch {done.torch}"] if done else []
    return _lines(run.name, ", ".join([f"seed {seed}", *where]))


def _numbers(done: Summary | None) -> list[str]:
    if done is None:
        return [""] * 4
    return [
        _lines(str(done.steps), f"{done.skipped_steps} skipped" if done.skipped_steps else ""),
        "" if done.val_metric is None else f"{done.metric} {done.val_metric:.4f}",
        "" if done.val_loss is None else f"{done.val_loss:.4g}",
        f"{done.seconds:.1f}",
    ]


def _count(group: RunGroup) -> str:
    finished = sum(run.finished for run in group.runs)
    return str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"


def _spread(span: Span | None, form: str) -> str:
    if span is None:
        return ""
    if span.low == span.high:
        return f"{span.mean:{form}}"
    return f"{span.mean:{form}}\n{span.low:{form}} – {span.high:{form}}"


def _gap(group: RunGroup, value: Number) -> str:
    """Return the gap to the fp32 runs and, below it, their spread."""
    pair = group.beside_fp32(value)
    if pair is None or group.runs[0].mode == "fp32":
        return ""
    mine, full = pair
    gap, spread = f"{mine.mean - full.mean:+.4f}", f"spread {full.high - full.low:.4f}"
    if min(mine.count, full.count) < _LEAST_SEEDS or full.low == full.high:
        spread = "too few seeds to tell"
    return f"{gap}\nfp32: n {full.count}, {spread}"


def _beside_fp32(group: RunGroup, value: Number, form: str = ".0f", times: float = 1.0) -> str:
    """Return the mean and, below it, its ratio to the fp32 runs', if each side has several."""
    span, pair = group.span(value), group.beside_fp32(value)
    mean = f"{span.mean * times:{form}}" if span else ""
    if pair is None or not pair[1].mean or group.runs[0].mode == "fp32":
        return mean
    several = min(pair[0].count, pair[1].count) > 1
    return f"{mean}\n{pair[0].mean / pair[1].mean:.2f} x fp32" if several else mean


def _final_scales(group: RunGroup) -> str:
    ends = [run.summary.final_scale for run in group.runs if run.finished and run.summary]
    return ", ".join(dict.fromkeys(_scale(end) for end in ends if end))


def _scale(scale: float | dict[str, float]) -> str:
    if isinstance(scale, dict):
        return " ".join(f"{name} {value:g}" for name, value in scale.items())
    return f"{scale:.10g}"


def _lines(first: str, second: str) -> str:
    return f"{first}\n{second}" if second else first


def _without_empty(table: Table) -> Table:
    kept = [any(cells) for _, *cells in zip(*table, strict=True)]
    return [list(compress(row, kept)) for row in table]
