"""The manifest: what a checkpoint's folder holds, sealed against change.

    {"format": 2, "content": {"files": {name: {"bytes", "sha256"}}, "facts": {...}}, "sha256": d}

d is the SHA-256 of format and content as JSON with sorted keys and no spaces: a bit that flips in
the manifest itself is found as surely as one in a file that it names.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mpframe.checkpoint.digest import sha256_of
from mpframe.checkpoint.layout import MANIFEST
from mpframe.errors import CheckpointError

FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder holds.

    Attributes:
        files: by name, size in `bytes` and `sha256`.
        facts: what is told of the checkpoint beside its state, as JSON.
    """

    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    def text(self) -> str:
        """The manifest as its file holds it."""
        content = {"files": self.files, "facts": self.facts}
        sealed = {"format": FORMAT, "content": content, "sha256": _seal(FORMAT, content)}
        return json.dumps(sealed, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint's folder; its files are not looked at.

        Raises:
            CheckpointError: there is none, it is damaged, or of another format.
        """
        path = folder / MANIFEST
        try:
            sealed = json.loads(path.read_bytes())
            version, content, digest = sealed["format"], sealed["content"], sealed["sha256"]
            files = {
                str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()
            }
            facts = dict(content["facts"])
        except OSError as error:
            raise CheckpointError(
                f"{folder}: no readable checkpoint ({MANIFEST}: {error.strerror}); "
                "name a run's folder or a checkpoint in it"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path}: damaged, not a manifest; use an older one") from None
        if version != FORMAT:
            raise CheckpointError(
                f"{folder}: format {version}, this version reads {FORMAT}; "
                "use the version of mpframe that wrote it"
            )
        if digest != _seal(version, content):
            raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")
        return cls(files, facts)

    def verify(self, folder: Path) -> None:
        """Hold every file against its size and digest.

        Raises:
            CheckpointError: one is missing or differs.
        """
        for name, expected in self.files.items():
            _verify(folder / name, expected)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        whole = size == expected["bytes"]
        same = whole and sha256_of(path) == expected["sha256"]
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); use an older one"
        ) from None
    if not whole:
        raise CheckpointError(
            f"{path}: damaged, {size} bytes instead of {expected['bytes']}; use an older one"
        )
    if not same:
        raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")


def _seal(version: int, content: Any) -> str:
    text = json.dumps([version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
