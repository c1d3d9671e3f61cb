"""The folders of checkpoints and their names.

step_00001200                a checkpoint, named after the global step
.step_00001200.new           being written
.step_00001200.replaced      about to be replaced by another of the same step
.step_00001200.dropped       about to be deleted
step_00001200.set_aside      newer than where the run continued: kept, never resumed from
"""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = "checkpoints"
STATE, CONFIG, MANIFEST = "state.pt", "config.yaml", "manifest.json"
_PARTS = re.compile(r"parts_\d{5,}\.pt")
_NAME = re.compile(r"step_(\d+)")


def path_of(folder: Path, global_step: int) -> Path:
    """The checkpoint of step `global_step` in a run's folder."""
    return folder / FOLDER / f"step_{global_step:08d}"


def step_of(path: Path) -> int:
    """The step a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def parts_of(rank: int) -> str:
    """The name of the file with a rank's parts of divided tensors."""
    return f"parts_{rank:05d}.pt"


def all_parts(names: Iterable[str]) -> list[str]:
    """Those of the names that are of such files, in the order of the ranks."""
    return sorted((name for name in names if _PARTS.fullmatch(name)), key=lambda n: int(n[6:-3]))


def hidden(path: Path, why: str) -> Path:
    """The name of a checkpoint's folder while it is not yet, or no longer, complete."""
    return path.with_name(f".{path.name}.{why}")


def newest(path: Path) -> Path:
    """`path` itself, or its newest checkpoint if it is a run's folder that has one."""
    found = [] if (path / MANIFEST).exists() else all_in(path)
    return found[-1] if found else path


def all_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, the oldest first (by step number, not by name)."""
    return sorted(
        (path for path in (folder / FOLDER).glob("step_*") if step_of(path) >= 0), key=step_of
    )
