"""Which run a checkpoint belongs to: it holds a random word that was drawn when the run began.

A folder's checkpoints differ only in their step, so those of two runs would replace and delete each
other. A folder belongs to one run.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpframe.checkpoint.layout import all_in
from mpframe.checkpoint.manifest import Manifest
from mpframe.errors import CheckpointError

FACT = "run"


def new_identity() -> str:
    """An identity that no other run has: 16 letters."""
    return secrets.token_hex(8)


def identity_of(facts: Mapping[str, Any]) -> str | None:
    """The identity among a checkpoint's facts; None if they name none."""
    identity = facts.get(FACT)
    return identity if isinstance(identity, str) and identity else None


def refuse_mixed(folder: Path) -> None:
    """Refuse a run's folder with checkpoints of two runs.

    Raises:
        CheckpointError: it has such checkpoints; the message names one of each run.
    """
    first: dict[str, Path] = {}
    for path in all_in(folder):
        identity = _of(path)
        if identity is not None:
            first.setdefault(identity, path)
    if len(first) > 1:
        one, other, *_ = first.values()
        raise CheckpointError(
            f"{folder}: holds checkpoints of two runs, {one.name} of one and {other.name} of "
            "another; move those of one run to another folder"
        )


def _of(path: Path) -> str | None:
    try:
        return identity_of(Manifest.read(path).facts)
    except CheckpointError:
        return None  # Damaged: skipped or refused when it is read.
