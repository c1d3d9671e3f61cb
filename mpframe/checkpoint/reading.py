"""Reads a checkpoint: digests first, and never any code.

torch.load lets a flipped bit pass, so every file is held against the manifest before it is opened.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from mpframe.checkpoint.archive import refuse_bomb, refuse_hollow
from mpframe.checkpoint.layout import CONFIG, MANIFEST, STATE, newest, step_of
from mpframe.checkpoint.manifest import Manifest
from mpframe.checkpoint.snapshot import Snapshot
from mpframe.errors import CheckpointError


def load(path: Path) -> dict[str, Any]:
    """The verified state of a checkpoint, on the CPU; see `read`."""
    return read(path).state


def read(path: Path) -> Snapshot:
    """All of a checkpoint, verified, its tensors on the CPU.

    Args:
        path: a checkpoint's folder, or a run's folder: then its newest checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or holds code.
    """
    path = newest(path)
    manifest = Manifest.read(path)
    for name in (STATE, CONFIG):
        if name not in manifest.files:
            raise CheckpointError(f"{path / MANIFEST}: names no {name}; use an older one")
    manifest.verify(path)
    config = (path / CONFIG).read_text(encoding="utf-8")
    return Snapshot(step_of(path), _state(path / STATE), config, manifest.facts)


def _state(path: Path) -> dict[str, Any]:
    refuse_bomb(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds code, which is never run; a checkpoint is tensors, "
            "numbers, strings, lists and dicts"
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a saved state ({str(error).splitlines()[0]}); use another checkpoint"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a run's state")
    refuse_hollow(path, state)
    return state
