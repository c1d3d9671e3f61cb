"""The manifest: what a checkpoint's folder contains, with a digest of itself.

    {"format": 2, "content": {"files": {name: {"bytes", "sha256"}}, "facts": {...}}, "sha256": d}

d is the SHA-256 of format and content as JSON with sorted keys and no spaces: it detects a flipped
bit in the manifest itself.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mpframe.checkpoint.digest import sha256_of
from mpframe.checkpoint.layout import MANIFEST
from mpframe.checkpoint.untrusted import damaged_if_raising
from mpframe.console import printable
from mpframe.errors import CheckpointError
from mpframe.files.plain_file import open_regular, read_regular

FORMAT = 2
_LARGEST = 2**20  # bytes; a manifest of ours has a few hundred


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder contains.

    Attributes:
        files: by name, size in `bytes` and `sha256`.
        facts: what is known of the checkpoint besides its state, as JSON.
    """

    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    def text(self) -> str:
        """The content of the manifest's file."""
        content = {"files": self.files, "facts": self.facts}
        sealed = {"format": FORMAT, "content": content, "sha256": content_digest(FORMAT, content)}
        return json.dumps(sealed, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a checkpoint's folder; its files are not read.

        Raises:
            CheckpointError: there is none, it is damaged, or of another format.
        """
        path = folder / MANIFEST
        try:
            written = read_regular(path, _LARGEST)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: no readable checkpoint ({MANIFEST}: {error.strerror}); "
                "name a run's folder or a checkpoint in it"
            ) from None
        with damaged_if_raising(path, "not a manifest"):
            return cls._parsed(json.loads(written), path)

    @classmethod
    def _parsed(cls, sealed: Any, path: Path) -> Self:
        version, content, digest = sealed["format"], sealed["content"], sealed["sha256"]
        files = {
            _inside(name, path): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in content["files"].items()
        }
        facts = dict(content["facts"])
        if version != FORMAT:
            stored = printable(str(version)[:40])
            raise CheckpointError(
                f"{path.parent}: format {stored}, this version reads {FORMAT}; "
                "use the version of mpframe that wrote it"
            )
        if digest != content_digest(version, content):
            raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")
        return cls(files, facts)

    def verify(self, folder: Path) -> None:
        """Compare every file with its size and digest.

        Raises:
            CheckpointError: one is missing or differs.
        """
        for name, expected in self.files.items():
            _verify(folder / name, expected)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    try:
        with open_regular(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
        complete = size == expected["bytes"]
        same = complete and sha256_of(path) == expected["sha256"]
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); use an older one"
        ) from None
    if not complete:
        raise CheckpointError(
            f"{path}: damaged, {size} bytes instead of {expected['bytes']}; use an older one"
        )
    if not same:
        raise CheckpointError(f"{path}: damaged, its digest differs; use an older one")


def _inside(name: str, path: Path) -> str:
    """A file's name from the manifest, if the file is in its folder."""
    if name in ("", ".", "..") or not set(name).isdisjoint("/\\\0"):
        raise CheckpointError(
            f"{path}: damaged, it names {name!r:.80}, which is no file of its folder; "
            "use an older one"
        )
    return name


def content_digest(version: int, content: Any) -> str:
    """The SHA-256 of a manifest's format and content, in hexadecimal."""
    text = json.dumps([version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
