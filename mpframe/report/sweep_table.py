"""The table of a sweep: one line per job, read back from the jobs' folders after each of them.

It has every job that lies in the sweep's folder, those of earlier starts of the sweep too.

A Hydra callback, wired in the config as

    hydra:
      callbacks:
        sweep_table:
          _target_: mpframe.report.sweep_table.SweepTable

It also keeps a sweep in one folder, even if `hydra.sweep.dir` contains the time; any
`hydra.sweep.subdir` will do.
"""

import atexit
import csv
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.config.composition.overrides import word_of
from mpframe.config.redaction import as_yaml, secrets_of, values_of
from mpframe.config.sweep.again import say_on_signal
from mpframe.config.sweep.values import axes
from mpframe.errors import printable
from mpframe.files.durable import write_atomically
from mpframe.files.turns import turn_in
from mpframe.report.sweep_jobs import COLUMNS, JobRow, find_jobs
from mpframe.tracking.summary import Status

# In the readable table these are told by the cell of another column.
_JOINED = {"metric", "best_step", "folder", "test_loss", "tested"}
_LARGEST_WHOLE = 2**40  # written digit by digit: any scale that training comes to


class SweepTable(Callback):
    """Keeps `sweep.md` and `sweep.csv` in `hydra.sweep.dir`, and prints the table in the end."""

    def __init__(self) -> None:
        self._folder = Path()
        self._planned = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _pin_sweep_dir(config)
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._planned = _planned(config)
        # Hydra does not call on_multirun_end if a job failed, but then the table is needed, too.
        atexit.register(self._report)
        if config.hydra.runtime.choices["hydra/launcher"] != "basic":
            say_on_signal(Path(config.hydra.sweep.dir))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        _hide_secrets(Path(config.hydra.sweep.dir) / "multirun.yaml")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """In the job's process, which may be one of several."""
        if config.hydra.mode is RunMode.MULTIRUN:
            write_table(Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._report)
        self._report()

    def _report(self) -> None:
        jobs = write_table(self._folder)
        if jobs:
            print(as_text(self._folder, jobs, self._planned))


def write_table(folder: Path) -> list[JobRow]:
    """Write `sweep.csv` and `sweep.md` into a sweep's folder; returns their jobs.

    Processes take turns, from reading to writing, so the last one has written all jobs.
    """
    if not folder.is_dir():
        return []
    with turn_in(folder):
        jobs = find_jobs(folder)
        if jobs:
            write_atomically(folder / "sweep.csv", _csv(jobs))
            title, rows = _readable(jobs)
            write_atomically(folder / "sweep.md", title + _markdown(rows) + _reasons(jobs, "\n- "))
    return jobs


def as_text(folder: Path, jobs: Sequence[JobRow], planned: int = 0) -> str:
    """The table as aligned plain text; the last line counts the planned jobs, if they are known."""
    title, rows = _readable(jobs)
    finished = sum(job.summary is not None and job.summary.status == "finished" for job in jobs)
    where = os.path.relpath(folder / "sweep.md")
    missing = max(0, planned - len(jobs))
    never = f", {missing} never began" if missing else ""
    last = f"{finished} of {len(jobs) + missing} jobs finished{never}; "
    last += f"this table: {where} and sweep.csv beside it"
    return f"\n{title}{_aligned(rows)}\n{_reasons(jobs, '')}{last}"


def _planned(config: DictConfig) -> int:
    """How many jobs the sweep has; 0 if its sweeper decides."""
    if config.hydra.runtime.choices["hydra/sweeper"] != "basic":
        return 0
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    given: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return math.prod(map(len, axes([*words, *given["task"]], given["hydra"])))


def _pin_sweep_dir(config: DictConfig) -> None:
    """Give every job the sweep's folder: Hydra composes it again for each job.

    A folder named after an option that is swept would otherwise scatter the jobs.
    """
    with read_write(config.hydra):
        config.hydra.overrides.hydra.append(word_of("hydra.sweep.dir", config.hydra.sweep.dir))


def _hide_secrets(path: Path) -> None:
    """Hydra has written the sweep's options by now; a shell may have put secrets among them."""
    if path.is_file():
        written = OmegaConf.load(path)
        shown = as_yaml(written, secrets_of(values_of(written), os.environ))
        if shown != path.read_text(encoding="utf-8"):
            write_atomically(path, shown)


def _csv(jobs: Sequence[JobRow]) -> str:
    shared = _shared(jobs)
    swept = [_options(o for o in job.overrides if o not in shared) for job in jobs]
    names = dict.fromkeys(name for options in swept for name in options)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(job.cells() | options for job, options in zip(jobs, swept, strict=True))
    return text.getvalue()


def _shared(jobs: Sequence[JobRow]) -> set[str]:
    """The overrides that all jobs have; those of a single job stay in its line."""
    return set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()


def _options(overrides: Iterable[str]) -> dict[str, str]:
    """The values by option."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {option: value for option, _, value in pairs}


def _readable(jobs: Sequence[JobRow]) -> tuple[str, list[list[str]]]:
    """What all jobs were given alike, and the rows, the head first, for a reader.

    The csv has one column for the metric's name and one for its value, people want one for both;
    so it is with the best value and its step, and with the test and whose weights were tested. A
    job's folder is named as its overrides say. Without a test there is no such column.
    """
    shared = _shared(jobs)
    left_out = _JOINED if any(map(_tested, jobs)) else _JOINED | {"test_metric"}
    rows = [[name.replace("_", " ") for name in COLUMNS if name not in left_out]]
    for job in jobs:
        cells = {name: _rounded(value) for name, value in job.cells().items()}
        cells["overrides"] = printable(" ".join(o for o in job.overrides if o not in shared))
        cells["val_metric"] = " ".join(filter(None, (cells.pop("metric"), cells["val_metric"])))
        cells["best"] = " at step ".join(filter(None, (cells["best"], cells.pop("best_step"))))
        cells["test_metric"] = _tested(job)
        rows.append([value for name, value in cells.items() if name not in left_out])
    alike = printable(" ".join(o for o in jobs[0].overrides if o in shared))
    return f"every job: {alike}\n\n" if shared else "", rows


def _tested(job: JobRow) -> str:
    """The test's value of the metric, or its loss, and whose weights were tested."""
    done = job.summary
    if done is None or done.test_loss is None:
        return ""
    value = f"loss {_rounded(done.test_loss)}"
    if done.test_metric is not None:
        value = _rounded(done.test_metric)
    return f"{value} ({done.tested})"


def _reasons(jobs: Sequence[JobRow], before: str) -> str:
    """Why jobs did not finish, a line each."""
    told = [(job.number, job.summary) for job in jobs if job.summary is not None]
    return "".join(
        f"{before}job {number} {summary.status}: {printable(summary.reason)}\n"
        for number, summary in told
        if summary.status is not Status.FINISHED and summary.reason
    )


def _rounded(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < _LARGEST_WHOLE
        return f"{value:.0f}" if whole else f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{name} {_rounded(own)}" for name, own in value.items())
    return printable(str(value))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
