"""The report's tables as plain text cells; page.py and markdown.py lay them out.

The second line of a cell is less important: a spread, a ratio. A column of empty cells is left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from mpframe.report.groups import RunGroup, Span
from mpframe.report.records import Record
from mpframe.tracking.summary import Summary

Table = list[list[str]]
NOTES = (
    "Numbers are means over the finished runs of a group, n of them, then the lowest and the "
    "highest. Gap and ratios are relative to the fp32 runs with otherwise equal options. A gap "
    "smaller than the spread of the fp32 runs, or of a single seed, means nothing.",
    "Samples / s are those of the whole run: its training samples over its training time, without "
    "validation and saving; the time of a step is the median.",
    "Memory is what torch allocated at most on a CUDA device. On a CPU it is the peak of the whole "
    "process, which all jobs of a sweep share: there only its growth is meaningful.",
)


def results(groups: Sequence[RunGroup]) -> Table:
    """A row for each group, after the head; an empty cell is unknown."""
    metrics = {run.summary.metric for group in groups for run in group.runs if run.summary}
    known = sorted(name for name in metrics if name)
    metric = known[0] if len(known) == 1 else "metric"
    head = ["dtype", "loss scaling", "options", "runs", metric, "gap to fp32", "val loss"]
    head += ["skipped", "final scale", "samples / s", "step, ms", "memory, MiB"]
    return _without_empty([head, *map(_row, groups)])


def unfinished(groups: Sequence[RunGroup]) -> Table:
    """A row for each run that is not finished, after the head; empty if all are."""
    rows = [
        [*_named(group, run), run.status, run.reason]
        for group in groups
        for run in group.runs
        if not run.finished
    ]
    head = ["run", "dtype", "loss scaling", "options", "seed", "status", "reason"]
    return _without_empty([head, *rows]) if rows else []


def every_run(groups: Sequence[RunGroup]) -> Table:
    """A row for each run, after the head."""
    head = ["run", "dtype", "loss scaling", "options", "seed", "status", "steps", "skipped"]
    head += ["metric", "val loss", "seconds", "device", "torch", "remark"]
    rows = [
        [*_named(group, run), run.status, *_numbers(run.summary), run.reason * run.finished]
        for group in groups
        for run in group.runs
    ]
    return _without_empty([head, *rows])


def _row(group: RunGroup) -> list[str]:
    first = group.runs[0]
    scales = [
        run.summary.final_scale for run in group.runs if run.summary and run.summary.final_scale
    ]
    return [
        first.mode,
        first.scaling,
        " ".join(group.differing),
        _counts(group.runs),
        _spread(group.span(_metric), ".4f"),
        _gap(group),
        _spread(group.span(lambda s: s.val_loss), ".4g"),
        _spread(group.span(lambda s: s.skipped_steps), ".4g"),
        ", ".join(dict.fromkeys(_scale(scale) for scale in scales)),
        _beside_fp32(group, lambda summary: summary.samples_per_second),
        _beside_fp32(group, _milliseconds, ".3g"),
        _beside_fp32(group, _mebibytes),
    ]


def _named(group: RunGroup, run: Record) -> list[str]:
    seed = run.summary.seed if run.summary else run.options.get("seed", "")
    return [run.name, run.mode, run.scaling, " ".join(group.differing), str(seed)]


def _numbers(done: Summary | None) -> list[str]:
    if done is None:
        return [""] * 7
    return [
        str(done.steps),
        str(done.skipped_steps),
        _validated(done),
        "" if done.val_loss is None else f"{done.val_loss:.4g}",
        f"{done.seconds:.1f}",
        done.device,
        done.torch,
    ]


def _validated(done: Summary) -> str:
    """The metric at the last validation and, below it, the best value of what is monitored."""
    if done.val_metric is None:
        return ""
    last = f"{done.metric} {done.val_metric:.4f}"
    if done.best is None:
        return last
    monitored = "loss " if done.monitor == "loss" else ""
    return f"{last}\nbest {monitored}{done.best:.4f}, step {done.best_step}"


def _counts(runs: Sequence[Record]) -> str:
    return ", ".join(f"{n} {status}" for status, n in Counter(r.status for r in runs).items())


def _spread(span: Span | None, form: str) -> str:
    if span is None:
        return ""
    if span.low == span.high:
        return f"{span.mean:{form}}"
    return f"{span.mean:{form}}\n{span.low:{form}} – {span.high:{form}}"


def _gap(group: RunGroup) -> str:
    """The gap and, below it, the spread to compare it with; of one seed the gap comes second."""
    pair = group.beside(_metric)
    if pair is None or group.runs[0].mode == "fp32":
        return ""
    own, full = pair
    gap, counts = f"{own.mean - full.mean:+.4f}", f"n {own.count}, fp32 n {full.count}"
    if min(own.count, full.count) == 1:
        return f"one seed\n{gap}, {counts}"
    return f"{gap}\n{counts} spread {full.high - full.low:.4f}"


def _beside_fp32(
    group: RunGroup, value: Callable[[Summary], float | None], form: str = ".0f"
) -> str:
    """The mean and, below it, its ratio to that of the fp32 runs, with the number of runs."""
    own, pair = group.span(value), group.beside(value)
    mean = f"{own.mean:{form}}" if own else ""
    if pair is None or not pair[1].mean:
        return mean
    ratio = pair[0].mean / pair[1].mean
    return f"{mean}\n{ratio:.2f} x, n {pair[0].count} / {pair[1].count}"


def _without_empty(table: Table) -> Table:
    _, *rows = table
    kept = [number for number in range(len(table[0])) if any(row[number] for row in rows)]
    return [[row[number] for number in kept] for row in table]


def _metric(summary: Summary) -> float | None:
    return summary.val_metric


def _milliseconds(summary: Summary) -> float | None:
    return None if summary.median_step_seconds is None else summary.median_step_seconds * 1e3


def _mebibytes(summary: Summary) -> float | None:
    return None if summary.peak_memory_bytes is None else summary.peak_memory_bytes / 2**20


def _scale(scale: float | dict[str, float]) -> str:
    if isinstance(scale, dict):
        return " ".join(f"{name} {own:g}" for name, own in scale.items())
    return f"{scale:.10g}"
