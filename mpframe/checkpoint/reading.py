"""Reads a checkpoint, verified and without running any code.

torch.load does not notice a flipped bit, so every file is first compared with the manifest.
"""

from pathlib import Path
from typing import Any

from mpframe.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    STATE,
    Manifest,
    all_parts,
    newest,
    refuse_mixed,
    step_of,
)
from mpframe.checkpoint.state import Snapshot, put_together
from mpframe.checkpoint.untrusted import damaged_if_raising, load_untrusted
from mpframe.core.errors import CheckpointError
from mpframe.files.plain_file import read_regular

_LARGEST_CONFIG = 2**20  # bytes
_CODE = "holds code, which is never run; a checkpoint is tensors, numbers, strings, lists and dicts"


def load(path: Path) -> dict[str, Any]:
    """Return the verified state of a checkpoint, on the CPU (see `read`)."""
    return read(path).state


def read(path: Path) -> Snapshot:
    """Read and verify a whole checkpoint, with its tensors on the CPU.

    path: a checkpoint's folder, or a run's folder, of which the newest checkpoint is read.

    CheckpointError: there is none, it is damaged, of another format, or holds code, or the folder
    has checkpoints of two runs.
    """
    if newest(path) != path:
        refuse_mixed(path)
    path = newest(path)
    manifest = Manifest.read(path)
    for name in (STATE, CONFIG):
        if name not in manifest.files:
            raise CheckpointError(f"{path / MANIFEST}: names no {name}; use an older one")
    manifest.verify(path)
    with damaged_if_raising(path / CONFIG, "not text"):
        config = read_regular(path / CONFIG, _LARGEST_CONFIG).decode()
    with damaged_if_raising(path / STATE, "not a saved state"):
        state = load_untrusted(path / STATE, _CODE)
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise CheckpointError(f"{path / STATE}: holds a {kind}, not a run's state")
    if parts := all_parts(manifest.files):
        put_together(state, [path / name for name in parts])
    return Snapshot(step_of(path), state, config, manifest.facts)
