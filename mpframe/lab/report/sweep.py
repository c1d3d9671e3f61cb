"""The table of a sweep: one line per job, read back from the jobs' folders after each of them.

It has every job that lies in the sweep's folder, also from earlier starts of the sweep.
cli/sweep.py keeps it while the sweep runs.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mpframe.core.errors import MpframeError, first_line
from mpframe.files.durable import write_atomically
from mpframe.files.file_lock import turn_in
from mpframe.files.stored_yaml import read_stored
from mpframe.files.text import align, few, markdown, printable, say
from mpframe.lab.report.records import NO_SUMMARY, read_outcome
from mpframe.tracking.summary import Status, Summary

COLUMNS = (
    *("job", "folder", "overrides", "mode", "scaling"),
    *("metric", "val_metric", "val_loss", "best", "best_step"),
    *("test_metric", "test_loss", "tested"),
    *("skipped_steps", "final_scale", "seconds", "status"),
)
"""The first columns of sweep.csv. A column for each option that is swept follows."""


@dataclass(frozen=True)
class JobRow:
    number: int  # Hydra's
    folder: str  # relative to the sweep's
    overrides: tuple[str, ...]  # of this job
    status: str  # as of a `Record`, with the reason
    reason: str
    summary: Summary | None  # how it ended, if that can be read

    def cells(self) -> dict[str, Any]:
        """Return the job's values by column, numbers unrounded. None is an empty cell."""
        cells: dict[str, Any] = dict.fromkeys(COLUMNS)
        if (done := self.summary) is not None:
            cells |= {key: getattr(done, key) for key in COLUMNS if hasattr(done, key)}
            cells["mode"] = " ".join(filter(None, (done.dtype, done.half)))
            cells["scaling"] = done.loss_scaling
        told = {"job": self.number, "folder": self.folder, "status": self.status}
        return cells | told | {"overrides": " ".join(self.overrides)}


def find_jobs(folder: Path) -> list[JobRow]:
    """Find the jobs of a sweep by their numbers, without other runs and sweeps below its folder."""
    jobs = []
    for path in folder.rglob(".hydra/hydra.yaml"):
        home = path.parents[1]
        try:
            number, place, overrides = _job_of(path, path.stat().st_mtime_ns)
        except (OSError, MpframeError, LookupError, TypeError, ValueError) as error:
            say(f"{printable(str(home))}: not a job's folder ({printable(first_line(error))})")
            continue
        name = str(home.relative_to(folder))
        if name == place:
            status, summary, reason = read_outcome(home)
            jobs.append(JobRow(number, name, overrides, status, reason, summary))
    return sorted(jobs, key=lambda job: (job.number, job.folder))


@cache
def _job_of(path: Path, written: int) -> tuple[int, str, tuple[str, ...]]:
    """Read a job's number, its folder inside its sweep's and its overrides, as Hydra had them."""
    hydra = read_stored(path)["hydra"]
    if hydra["mode"] != "MULTIRUN":
        return 0, "", ()
    home = os.path.join(hydra["runtime"]["cwd"], hydra["sweep"]["dir"])
    place = os.path.relpath(hydra["runtime"]["output_dir"], home)
    return int(hydra["job"]["num"]), place, tuple(map(str, hydra["overrides"]["task"]))


# In the readable table another column's cell holds these. A folder is named after the overrides.
_JOINED = {"metric", "best_step", "folder", "test_loss", "tested"}
_LARGEST_WHOLE = 2**40  # written digit by digit: any scale that training comes to


def write_table(folder: Path) -> list[JobRow]:
    """Write `sweep.csv` and `sweep.md` into a sweep's folder, and return their jobs."""
    if not folder.is_dir():
        return []
    with turn_in(folder):  # From reading to writing, so that the last process writes all jobs.
        jobs = find_jobs(folder)
        if jobs:
            write_atomically(folder / "sweep.csv", _csv(jobs))
            title, rows = _readable(jobs)
            page = f"{title}{markdown(rows)}\n" + _reasons(jobs, "\n- ")
            write_atomically(folder / "sweep.md", page)
    return jobs


def as_text(folder: Path, jobs: Sequence[JobRow]) -> str:
    """Write the table as aligned text."""
    title, rows = _readable(jobs)
    ends = Counter(job.status for job in jobs)
    pruned = f", {ends[Status.PRUNED]} pruned" if Status.PRUNED in ends else ""
    last = f"{ends[Status.FINISHED]} of {len(jobs)} jobs finished{pruned}; this table: "
    last += f"{os.path.relpath(folder / 'sweep.md')} and sweep.csv beside it"
    return f"\n{title}{align(rows)}\n{_reasons(jobs)}{last}"


def _csv(jobs: Sequence[JobRow]) -> str:
    shared = _find_shared(jobs)
    swept = [_options(o for o in job.overrides if o not in shared) for job in jobs]
    names = dict.fromkeys(name for options in swept for name in options)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(job.cells() | options for job, options in zip(jobs, swept, strict=True))
    return text.getvalue()


def _find_shared(jobs: Sequence[JobRow]) -> set[str]:
    """Return the overrides that all jobs have. A single job's stay in its line."""
    return set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()


def _options(overrides: Iterable[str]) -> dict[str, str]:
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {option: value for option, _, value in pairs}


def _readable(jobs: Sequence[JobRow]) -> tuple[str, list[list[str]]]:
    """Name the overrides that all jobs have, and return the rows for a reader, the head first."""
    shared = _find_shared(jobs)
    left_out = _JOINED if any(map(_format_test, jobs)) else _JOINED | {"test_metric"}
    rows = [[name.replace("_", " ") for name in COLUMNS if name not in left_out]]
    for job in jobs:
        cells = {name: _round(value) for name, value in job.cells().items()}
        cells["overrides"] = printable(" ".join(o for o in job.overrides if o not in shared))
        cells["val_metric"] = " ".join(filter(None, (cells.pop("metric"), cells["val_metric"])))
        cells["best"] = " at step ".join(filter(None, (cells["best"], cells.pop("best_step"))))
        cells["test_metric"] = _format_test(job)
        rows.append([value for name, value in cells.items() if name not in left_out])
    alike = printable(" ".join(o for o in jobs[0].overrides if o in shared))
    return f"every job: {alike}\n\n" if shared else "", rows


def _format_test(job: JobRow) -> str:
    """Return the test's value of the metric, or its loss, and whose weights were tested."""
    done = job.summary
    if done is None or done.test_loss is None:
        return ""
    loss, metric = _round(done.test_loss), _round(done.test_metric)
    return f"{metric or f'loss {loss}'} ({done.tested})"


def _reasons(jobs: Sequence[JobRow], before: str = "") -> str:
    numbers: dict[str, list[str]] = {}
    for job in jobs:
        if job.reason and job.status not in (Status.FINISHED, NO_SUMMARY):
            numbers.setdefault(f"{job.status}: {job.reason}", []).append(str(job.number))
    return "".join(
        f"{before}job{'s' * (len(alike) > 1)} {few(alike, 8)} {reason}\n"
        for reason, alike in numbers.items()
    )


def _round(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < _LARGEST_WHOLE
        return f"{value:.0f}" if whole else f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{name} {_round(number)}" for name, number in value.items())
    return printable(str(value))
