"""Whose checkpoint it is: each names its run, by a random word drawn when the run starts anew.

A folder's checkpoints are told apart by their step alone, so those of two runs would replace and
prune one another. A folder is one run's; what an older version saved names none, and is taken for
the folder's own.
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
    """An identity no other run has: 16 letters."""
    return secrets.token_hex(8)


def identity_of(facts: Mapping[str, Any]) -> str | None:
    """The identity among a checkpoint's facts; None where they name none."""
    identity = facts.get(FACT)
    return identity if isinstance(identity, str) and identity else None


def refuse_mixed(folder: Path) -> None:
    """Refuse a run's folder with checkpoints of two runs.

    Raises:
        CheckpointError: there are; one of each is named.
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
            "another; move those of one into a folder of their own"
        )


def _of(path: Path) -> str | None:
    try:
        return identity_of(Manifest.read(path).facts)
    except CheckpointError:
        return None  # Damaged: passed over, or refused, where it is read.
