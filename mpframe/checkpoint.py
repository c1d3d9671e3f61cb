"""Checkpoints: a folder that appears whole or not at all, and is verified before it is believed.

    checkpoints/step_00001200/state.pt       everything that can change the run's future
                              manifest.json  format version and the SHA-256 of state.pt

A checkpoint is written beside its place under a temporary name, flushed to the disk and then
renamed: a kill or a full disk at any moment leaves the older ones whole. Loading checks the digest
first (torch.load itself lets a flipped bit pass) and never unpickles code.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpframe.errors import CheckpointError

FORMAT = 1
FOLDER = "checkpoints"


def save(folder: Path, attempts: int, state: dict[str, Any], keep_last: int) -> Path:
    """Save `state` as the checkpoint of step `attempts`, then drop all but the newest.

    Args:
        folder: the run's folder.
        attempts: steps tried so far; names the checkpoint.
        state: tensors, numbers, strings, and lists and dicts of them.
        keep_last: how many checkpoints to keep, >= 1.

    Raises:
        CheckpointError: the checkpoint could not be written; the older ones are whole.
    """
    parent = folder / FOLDER
    final = parent / f"step_{attempts:08d}"
    temporary = parent / f".{final.name}.{os.getpid()}"
    try:
        parent.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, state)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync_folder(parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} could not be written ({error.strerror or error}); "
            "older checkpoints are whole: free space or choose another hydra.run.dir"
        ) from error
    for old in all_in(folder)[:-keep_last]:
        shutil.rmtree(old)
    return final


def load(path: Path) -> dict[str, Any]:
    """The verified state of a checkpoint, on the CPU.

    Args:
        path: a checkpoint's folder, or a run's folder: then its newest checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a newer format.
    """
    if not (path / "manifest.json").exists() and all_in(path):
        path = all_in(path)[-1]
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        content = (path / "state.pt").read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: no readable checkpoint ({error}); name a run's folder or a checkpoint in it"
        ) from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')}, this version reads {FORMAT}; "
            "use the version of mpframe that wrote it"
        )
    if hashlib.sha256(content).hexdigest() != manifest.get("sha256"):
        raise CheckpointError(f"{path / 'state.pt'}: damaged, its digest differs; use an older one")
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path / 'state.pt'}: holds code, which is never run; a checkpoint is tensors, "
            "numbers, strings, lists and dicts"
        ) from None
    return state


def all_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, the oldest first (by step number, not by name)."""
    found = [path for path in (folder / FOLDER).glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def rng_state() -> dict[str, Any]:
    """The state of every random generator a step may draw from, loadable without unpickling."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).copy()), *map(float, rest)],
        "python": random.getstate(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put the random generators where `rng_state` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy(), int(position), int(has_gauss), gauss))
    random.setstate(state["python"])


def _write(folder: Path, state: dict[str, Any]) -> None:
    # Through a Python file a full disk is an OSError that says so; torch's own writer hides it.
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        _sync(file)
    digest = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    with (folder / "manifest.json").open("w") as file:
        json.dump({"format": FORMAT, "sha256": digest}, file)
        _sync(file)
    _sync_folder(folder)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
