"""The folders of checkpoints: their names, their manifests, and which of them are kept.

    step_00001200                a checkpoint, named after the global step
    .step_00001200.new           being written
    .step_00001200.replaced      about to be replaced by another of the same step
    .step_00001200.dropped       about to be deleted
    step_00001200.set_aside      newer than where the run continued: kept, never resumed from

The newest and the best checkpoints are kept. None is deleted before a newer one is durable. A
folder is renamed before it is deleted, so that a kill leaves no half-deleted one.
"""

import hashlib
import json
import math
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from mpframe.checkpoint.untrusted import raise_as_damaged
from mpframe.core.errors import CheckpointError
from mpframe.files.plain_file import open_regular, read_regular

FOLDER = "checkpoints"
STATE, CONFIG, MANIFEST = "state.pt", "config.yaml", "manifest.json"
_NAME = re.compile(r"step_(\d+)")
_FILE = re.compile(r"\w+\.\w+", re.ASCII)  # leads nowhere else


def path_of(folder: Path, global_step: int) -> Path:
    """Return the checkpoint of step `global_step` in a run's folder."""
    return folder / FOLDER / f"step_{global_step:08d}"


def step_of(path: Path) -> int:
    """Return the step a checkpoint's folder is named after, or -1."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def parts_of(rank: int) -> str:
    """Return the name of the file with a rank's parts of divided tensors."""
    return f"parts_{rank:05d}.pt"


def hidden_path(path: Path, why: str) -> Path:
    """Return the name of a checkpoint's folder while it is not yet, or no longer, complete."""
    return path.with_name(f".{path.name}.{why}")


def newest(path: Path) -> Path:
    """Return `path`, or its newest checkpoint if it is a run's folder that has one."""
    found = [] if (path / MANIFEST).exists() else all_in(path)
    return found[-1] if found else path


def all_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run's folder, the oldest first (by number, not by name)."""
    found = (folder / FOLDER).glob("step_*")
    return sorted((path for path in found if step_of(path) >= 0), key=step_of)


FORMAT = 2
_LARGEST = 2**20  # bytes, of which a manifest of ours has a few hundred


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint with their `bytes` and `sha256`, and JSON facts about it."""

    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    def text(self) -> str:
        """Return the content of the manifest's file."""
        content = {"files": self.files, "facts": self.facts}
        sealed = {"format": FORMAT, "content": content, "sha256": content_digest(FORMAT, content)}
        return json.dumps(sealed, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a checkpoint's folder, but not its files."""
        path = folder / MANIFEST
        try:
            written = read_regular(path, _LARGEST)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: no readable checkpoint ({MANIFEST}: {error.strerror}); "
                "name a run's folder or a checkpoint in it"
            ) from None
        with raise_as_damaged(path, "not a manifest"):
            sealed = json.loads(written)
            version, content, digest = sealed["format"], sealed["content"], sealed["sha256"]
            files = {
                name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()
            }
            manifest = cls(files, dict(content["facts"]))
            if not {STATE, CONFIG} <= files.keys() or not all(map(_FILE.fullmatch, files)):
                raise ValueError("it names other files than a checkpoint has")
            same = digest == content_digest(version, content)
        if version != FORMAT:
            raise CheckpointError(
                f"{folder}: format {version!r:.40}, this version reads {FORMAT}; "
                "use the version of mpframe that wrote it"
            )
        if not same:
            raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")
        return manifest

    def verify(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Compare every file, or a rank's share of them, with its size and digest."""
        for name, expected in [*self.files.items()][rank::ranks]:
            path = folder / name
            try:
                with open_regular(path, "rb") as file:
                    found = entry_of(file)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be read ({error.strerror}); use an older one"
                ) from None
            if found != expected:
                raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")


def entry_of(file: IO[bytes]) -> dict[str, Any]:
    """Return the size of an open file, and the digest of its content, for a manifest."""
    digest = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
    return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def content_digest(version: int, content: Any) -> str:
    """Return the SHA-256 of a manifest's format and content, in hexadecimal."""
    text = json.dumps([version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def prune(folder: Path, keep_last: int, keep_best: int) -> None:
    """Delete all but the `keep_last` newest and the `keep_best` best checkpoints of a run."""
    found = all_in(folder)
    kept = {*found[max(0, len(found) - keep_last) :], *best_in(folder, keep_best)}
    for path in found:
        if path not in kept:
            dropped = hidden_path(path, "dropped")
            path.rename(dropped)
            shutil.rmtree(dropped)


def best_in(folder: Path, count: int) -> list[Path]:
    """Return the checkpoints with the best validation, best first, then the oldest first."""
    return [path for _, path in _ranked(folder)[:count]] if count else []


def rank_to_beat(folder: Path, count: int) -> float:
    """Return the worst rank among the `count` best checkpoints, or inf if there are fewer."""
    ranked = _ranked(folder)
    return ranked[count - 1][0] if len(ranked) >= count else math.inf


def _ranked(folder: Path) -> list[tuple[float, Path]]:
    """Return the rank and path of each validated checkpoint, in the order of `best_in`."""
    ranked: list[tuple[float, Path]] = []
    for path in all_in(folder):
        # A manifest may be missing, and its facts may be anything.
        with suppress(CheckpointError, LookupError, TypeError, ValueError, OverflowError):
            place = rank_of(Manifest.read(path).facts.get("validation"))
            if place is not None:
                ranked.append((place, path))
    return sorted(ranked, key=lambda pair: pair[0])


def rank(value: float, higher_is_better: bool) -> float | None:
    """Return a number that is lower for a better value, or None for nan and inf."""
    if not math.isfinite(value):
        return None
    return -value if higher_is_better else value


def rank_of(validation: dict[str, Any] | None) -> float | None:
    """Return the rank of a validation, as a checkpoint's manifest holds it, if it has one."""
    if validation is None or validation["value"] is None:
        return None
    return rank(float(validation["value"]), bool(validation["higher_is_better"]))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints newer than `step`, where a run continues, and return their paths.

    They are bad, or the run will not repeat them, so nothing may resume from them. An older one
    that was set aside under the same name is deleted.
    """
    moved = []
    for path in all_in(folder):
        if step_of(path) > step:
            place = path.with_name(f"{path.name}.set_aside")
            shutil.rmtree(place, ignore_errors=True)
            moved.append(path.rename(place))
    return moved


def tidy(folder: Path) -> None:
    """Remove what a killed run left half-written, while holding the run's lock."""
    for path in (folder / FOLDER).glob(".step_*"):
        final = path.with_name(path.stem[1:])
        if path.suffix == ".replaced" and not final.exists():
            path.rename(final)  # Killed between the two renames that replace a checkpoint.
        elif path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
