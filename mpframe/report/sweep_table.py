"""The table at the end of a sweep: one line per job, read back from the jobs' folders.

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
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from mpframe.config.redaction import as_yaml, secrets_of, values_of
from mpframe.errors import MpframeError, printable
from mpframe.files.durable import write_atomically
from mpframe.tracking.summary import FILE_NAME, Summary

NO_SUMMARY = "no summary"
COLUMNS = (
    "job",
    "overrides",
    "mode",
    "scaling",
    "metric",
    "val_metric",
    "val_loss",
    "best",
    "best_step",
    "skipped_steps",
    "final_scale",
    "seconds",
    "status",
)
_JOINED = {"metric", "best_step"}  # In the readable table each is in the cell of its value.


class SweepTable(Callback):
    """Prints the sweep's table and leaves it as `sweep.md` and `sweep.csv` in `hydra.sweep.dir`."""

    def __init__(self) -> None:
        self._folder = Path()
        self._started = 0.0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _pin_sweep_dir(config)
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._started = time.time()
        # Hydra does not call on_multirun_end if a job failed, but then the table is needed, too.
        atexit.register(self._report)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        _hide_secrets(Path(config.hydra.sweep.dir) / "multirun.yaml")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._report)
        self._report()

    def _report(self) -> None:
        jobs = find_jobs(self._folder, since=self._started)
        if jobs:
            print(report(self._folder, jobs))


@dataclass(frozen=True)
class JobRow:
    """One job of a sweep.

    Attributes:
        number: Hydra's job number.
        overrides: what the command line set for this job.
        summary: how it ended; None if there is no readable summary.
    """

    number: int
    overrides: tuple[str, ...]
    summary: Summary | None

    def cells(self) -> dict[str, Any]:
        """The job's values by column, numbers unrounded; None is an empty cell."""
        cells: dict[str, Any] = dict.fromkeys(COLUMNS)
        cells |= {"job": self.number, "overrides": " ".join(self.overrides), "status": NO_SUMMARY}
        if self.summary is not None:
            cells |= {key: value for key, value in vars(self.summary).items() if key in cells}
            cells["mode"] = " ".join(filter(None, (self.summary.dtype, self.summary.half)))
            cells["scaling"] = self.summary.loss_scaling
        return cells


def find_jobs(folder: Path, since: float = 0.0) -> list[JobRow]:
    """The jobs below a sweep's folder, in the order of their numbers.

    Args:
        folder: `hydra.sweep.dir`.
        since: Unix time in seconds; what is older was left by another sweep in the same folder.
    """
    configs = (
        path for path in folder.rglob(".hydra/overrides.yaml") if path.stat().st_mtime >= since
    )
    jobs = (_read_job(path.parent, since) for path in configs)
    return sorted(jobs, key=lambda job: job.number)


def report(folder: Path, jobs: Sequence[JobRow]) -> str:
    """Write `sweep.csv` and `sweep.md` into `folder`; returns the table as aligned plain text."""
    write_atomically(folder / "sweep.csv", _csv(jobs))
    shared, rows = _readable(jobs)
    title = f"every job: {shared}\n\n" if shared else ""
    write_atomically(folder / "sweep.md", title + _markdown(rows))
    finished = sum(job.summary is not None and job.summary.status == "finished" for job in jobs)
    where = os.path.relpath(folder / "sweep.md")
    last = f"{finished} of {len(jobs)} jobs finished; this table: {where} and sweep.csv beside it"
    return f"\n{title}{_aligned(rows)}\n{last}"


def _pin_sweep_dir(config: DictConfig) -> None:
    """Give every job the sweep's folder: Hydra composes it again for each job.

    A folder named after an option that is swept would otherwise scatter the jobs.
    """
    folder = config.hydra.sweep.dir.replace("'", "\\'")
    with read_write(config.hydra):
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")


def _hide_secrets(path: Path) -> None:
    """Hydra has written the sweep's options by now; a shell may have put secrets among them."""
    if path.is_file():
        written = OmegaConf.load(path)
        shown = as_yaml(written, secrets_of(values_of(written), os.environ))
        if shown != path.read_text(encoding="utf-8"):
            write_atomically(path, shown)


def _read_job(hydra_folder: Path, since: float) -> JobRow:
    hydra = OmegaConf.load(hydra_folder / "hydra.yaml").hydra
    overrides = OmegaConf.load(hydra_folder / "overrides.yaml")
    return JobRow(hydra.job.num, tuple(overrides), _read_summary(hydra_folder.parent, since))


def _read_summary(folder: Path, since: float) -> Summary | None:
    path = folder / FILE_NAME
    if not path.exists() or path.stat().st_mtime < since:
        return None
    try:
        return Summary.read(folder)
    except (OSError, MpframeError) as error:
        print(printable(str(error)))
        return None


def _csv(jobs: Iterable[JobRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(job.cells() for job in jobs)
    return text.getvalue()


def _readable(jobs: Sequence[JobRow]) -> tuple[str, list[list[str]]]:
    """What all jobs were given alike, and the rows, the head first, for a reader.

    The csv has one column for the metric's name and one for its value, people want one for both;
    so it is with the best value and its step.
    """
    shared = [o for o in jobs[0].overrides if all(o in job.overrides for job in jobs)]
    shared = shared if len(jobs) > 1 else []
    rows = [[name.replace("_", " ") for name in COLUMNS if name not in _JOINED]]
    for job in jobs:
        cells = {name: _rounded(value) for name, value in job.cells().items()}
        cells["overrides"] = printable(" ".join(o for o in job.overrides if o not in shared))
        cells["val_metric"] = " ".join(filter(None, (cells.pop("metric"), cells["val_metric"])))
        cells["best"] = " at step ".join(filter(None, (cells["best"], cells.pop("best_step"))))
        rows.append(list(cells.values()))
    return " ".join(shared), rows


def _rounded(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
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
