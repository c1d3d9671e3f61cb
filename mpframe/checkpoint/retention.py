"""Which checkpoints of a run are kept: the newest ones, and the best ones by validation.

None is deleted before a newer one is durable. A folder is renamed before it is deleted, so that a
half-deleted one never looks like a checkpoint after a crash.
"""

import math
import shutil
from pathlib import Path
from typing import Any

from mpframe.checkpoint.layout import FOLDER, all_in, hidden, step_of
from mpframe.checkpoint.manifest import Manifest
from mpframe.errors import CheckpointError


def prune(folder: Path, keep_last: int, keep_best: int) -> None:
    """Delete all but the newest and the best checkpoints.

    Args:
        folder: the run's folder.
        keep_last: how many of the newest to keep, >= 0.
        keep_best: how many of the best by validation to keep as well, >= 0.

    Raises:
        OSError: a checkpoint could not be deleted.
    """
    found = all_in(folder)
    kept = {*found[max(0, len(found) - keep_last) :], *best_in(folder, keep_best)}
    for path in found:
        if path not in kept:
            dropped = hidden(path, "dropped")
            path.rename(dropped)
            shutil.rmtree(dropped)


def best_in(folder: Path, count: int) -> list[Path]:
    """The checkpoints with the best validation, the best first; of two equal ones the older one."""
    if count == 0:
        return []
    ranked = [(rank, path) for path in all_in(folder) if (rank := _rank_of(path)) is not None]
    return [path for _, path in sorted(ranked, key=lambda pair: pair[0])[:count]]


def rank_to_beat(folder: Path, count: int) -> float:
    """The worst rank among the `count` best checkpoints; inf if there are fewer."""
    best = best_in(folder, count)
    return math.inf if len(best) < count else _rank_of(best[-1]) or 0.0


def rank(value: float, higher_is_better: bool) -> float | None:
    """A number that is lower for a better value; None for nan and inf, which are no result."""
    if not math.isfinite(value):
        return None
    return -value if higher_is_better else value


def rank_of(validation: dict[str, Any]) -> float | None:
    """The rank of a validation, as a checkpoint's manifest holds it."""
    if validation["value"] is None:
        return None
    return rank(float(validation["value"]), bool(validation["higher_is_better"]))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Set aside the checkpoints newer than `step`, from which a run continues.

    They are bad, or the run will not repeat them: nothing may resume from them, and they do not
    count among the newest. An older one that was set aside under the same name is deleted.

    Returns:
        Their new paths.
    """
    moved = []
    for path in all_in(folder):
        if step_of(path) > step:
            place = path.with_name(f"{path.name}.set_aside")
            shutil.rmtree(place, ignore_errors=True)
            moved.append(path.rename(place))
    return moved


def tidy(folder: Path) -> None:
    """Remove what a killed run left half-written or half-deleted.

    Only the process that holds the run's lock may do so.
    """
    for path in (folder / FOLDER).glob(".step_*"):
        final = path.with_name(path.stem[1:])
        if path.suffix == ".replaced" and not final.exists():
            path.rename(final)  # Killed between the two renames that replace a checkpoint.
        elif path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _rank_of(path: Path) -> float | None:
    """The rank of a checkpoint; None if it was not validated or cannot be read."""
    try:
        validation = Manifest.read(path).facts.get("validation")
        return None if validation is None else rank_of(validation)
    except (CheckpointError, LookupError, TypeError, ValueError, OverflowError):
        return None  # A manifest's facts may be anything.
