"""The jobs of a sweep, read back from the folders they ran in."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mpframe.console import printable
from mpframe.errors import MpframeError, first_line
from mpframe.files.stored_yaml import read_stored
from mpframe.tracking.summary import Summary

NO_SUMMARY = "no summary"
COLUMNS = (
    "job",
    "folder",
    "overrides",
    "mode",
    "scaling",
    "metric",
    "val_metric",
    "val_loss",
    "best",
    "best_step",
    "test_metric",
    "test_loss",
    "tested",
    "skipped_steps",
    "final_scale",
    "seconds",
    "status",
)
"""Of sweep.csv; a column for each option that is swept follows."""


@dataclass(frozen=True)
class JobRow:
    """One job of a sweep.

    Attributes:
        number: Hydra's job number.
        folder: the job's, relative to the sweep's.
        overrides: what the command line set for this job.
        summary: how it ended; None if there is no readable summary.
    """

    number: int
    folder: str
    overrides: tuple[str, ...]
    summary: Summary | None

    def cells(self) -> dict[str, Any]:
        """The job's values by column, numbers unrounded; None is an empty cell."""
        cells: dict[str, Any] = dict.fromkeys(COLUMNS)
        cells |= {"job": self.number, "folder": self.folder, "status": NO_SUMMARY}
        cells["overrides"] = " ".join(self.overrides)
        if self.summary is not None:
            cells |= {key: value for key, value in vars(self.summary).items() if key in cells}
            cells["mode"] = " ".join(filter(None, (self.summary.dtype, self.summary.half)))
            cells["scaling"] = self.summary.loss_scaling
            cells["test_metric"] = self.summary.test_metric
        return cells


def find_jobs(folder: Path) -> list[JobRow]:
    """The jobs of a sweep, in the order of their numbers.

    A single run below the sweep's folder is none of them, nor is a job of a sweep inside it.

    Args:
        folder: `hydra.sweep.dir`; it may have been moved.
    """
    jobs = []
    for path in folder.rglob(".hydra/hydra.yaml"):
        home = path.parents[1]
        try:
            number, place, overrides = _job_of(path, path.stat().st_mtime_ns)
        except (OSError, MpframeError, LookupError, TypeError, ValueError) as error:
            print(f"{printable(str(home))}: not a job's folder ({printable(first_line(error))})")
            continue
        name = str(home.relative_to(folder))
        if name == place:
            jobs.append(JobRow(number, name, overrides, _summary_in(home)))
    return sorted(jobs, key=lambda job: (job.number, job.folder))


@cache
def _job_of(path: Path, written: int) -> tuple[int, str, tuple[str, ...]]:
    """A job's number, its folder inside its sweep's and its overrides, as Hydra had them.

    The file is read once, however many jobs follow.
    """
    own = read_stored(path)["hydra"]
    if own["mode"] != "MULTIRUN":
        return 0, "", ()
    home = os.path.join(own["runtime"]["cwd"], own["sweep"]["dir"])
    place = os.path.relpath(own["runtime"]["output_dir"], home)
    return int(own["job"]["num"]), place, tuple(map(str, own["overrides"]["task"]))


def _summary_in(folder: Path) -> Summary | None:
    try:
        return Summary.read(folder)
    except FileNotFoundError:
        return None
    except (OSError, MpframeError) as error:
        print(printable(str(error)))
        return None
