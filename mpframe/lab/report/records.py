"""Reads a run's folder: its options, how it ended and its curves."""

import logging
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonpath
from pathlib import Path
from typing import Any

from mpframe.config.check import flatten
from mpframe.core.errors import ConfigError, MpframeError, first_line
from mpframe.files.stored_yaml import read_stored
from mpframe.files.text import printable
from mpframe.tracking.summary import FILE_NAME, Summary

CONFIG = "config_resolved.yaml"
MARKS = (FILE_NAME, CONFIG, ".hydra/overrides.yaml")
NO_SUMMARY = "no summary"

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Record:
    name: str  # its folder, relative to the folder of all runs
    status: str  # finished, pruned, interrupted, diverged, failed, `no summary`, or `unreadable`
    reason: str = ""  # why it is not finished, in one line
    options: Mapping[str, Any] = field(default_factory=dict)  # by dotted path
    summary: Summary | None = None  # how it ended
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by tag, (step, value) in order

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def mode(self) -> str:
        """The dtype mode with its half format, e.g. `mixed float16`."""
        known = self.summary
        mode = known.dtype if known else str(self.options.get("dtype.mode", "unknown"))
        half = known.half if known else self.options.get("dtype.half")
        return mode if mode in ("fp32", "unknown") or not half else f"{mode} {half}"

    @property
    def scaling(self) -> str:
        if self.summary is not None:
            return self.summary.loss_scaling
        return str(self.options.get("loss_scaling._target_", "unknown")).rpartition(".")[2]


def find_runs(paths: Sequence[Path]) -> tuple[Path, list[Record]]:
    """Read every run in or below some folders, in the order of their names.

    Also returns the folder for a report on them: the first one, or its parent if that is a run.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        found = sorted(_run_folders(path), key=_natural)
        if not found:
            what = "holds no run" if path.is_dir() else "no such folder"
            raise ConfigError(f"{path}: {what}; name the folder of a run or of a sweep")
        folders |= dict.fromkeys(found)
    first = paths[0].resolve()
    top = Path(commonpath([folder.parent for folder in folders]))
    home = first.parent if first in folders else first
    return home, [read(folder, top) for folder in folders]


def read(folder: Path, top: Path) -> Record:
    """Read the run in a folder, named relative to `top`. Its reason says what cannot be read."""
    status, summary, reason = read_outcome(folder)
    try:
        options = flatten(_printable(read_stored(folder / CONFIG)))
    except (OSError, MpframeError) as error:
        options, reason = {}, reason or _line(error, folder)
    try:
        curves = _curves(folder)
    except Exception as error:  # TensorBoard's reader may raise anything on a crafted file.
        curves, reason = {}, reason or f"its event files are damaged ({_line(error, folder):.80})"
    name = printable(str(folder.relative_to(top)))  # Its files may come from anybody.
    told = printable(reason.replace(f"{folder}/", ""))  # The report may leave this machine.
    return Record(name, status, told, options, summary, curves)


def _run_folders(path: Path) -> Iterable[Path]:
    if any((path / mark).exists() for mark in MARKS):
        return [path.resolve()]
    found = {file for mark in MARKS for file in path.rglob(mark)}
    return {(f.parents[1] if f.parent.name == ".hydra" else f.parent).resolve() for f in found}


def _natural(folder: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that puts 2 before 10."""
    words = re.split(r"(\d+)", str(folder))
    return [(1, int(word), "") if word.isdecimal() else (0, 0, word) for word in words]


def read_outcome(folder: Path) -> tuple[str, Summary | None, str]:
    """Return how the run in a folder ended: its status, its summary if any, and the reason."""
    try:
        summary = Summary.read(folder)
    except FileNotFoundError:
        return NO_SUMMARY, None, "killed, or still running"
    except (OSError, MpframeError) as error:
        return "unreadable", None, _line(error, folder)
    shown = replace(summary, **_printable(vars(summary)))
    return str(shown.status), shown, shown.reason or ""


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_printable(key): _printable(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_printable(held) for held in value]
    return printable(value) if type(value) is str else value


def _line(error: Exception, folder: Path) -> str:
    """Return the text of an error, without the folder's path on this machine."""
    return first_line(error).replace(f"{folder}/", "")


def _curves(folder: Path) -> dict[str, Curve]:
    # Imported late: every run loads this module for the table of a sweep, and few read curves.
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    for path in folder.iterdir():
        if "tfevents" in path.name and not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(f"{path.name} is not a regular file")
    sizes = {"scalars": 0, "images": 1, "tensors": 1}
    events = event_accumulator.EventAccumulator(str(folder), size_guidance=sizes)
    reader = logging.getLogger("tensorboard")
    reader.addFilter(_is_no_resume)
    try:
        events.Reload()
    finally:
        reader.removeFilter(_is_no_resume)
    return {
        printable(tag): [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _is_no_resume(record: logging.LogRecord) -> bool:
    """Drop TensorBoard's warning of steps that a resumed run has repeated and hides."""
    return "out of order" not in str(record.msg)
