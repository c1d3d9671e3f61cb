"""Checkpoints made to hang or to break their reader, and what is said of each."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mpframe.checkpoint.folder import Manifest, content_digest

Change = Callable[[Path], None]


def seal(folder: Path, facts: dict[str, Any] | None = None) -> None:
    """Write a manifest that fits the files of a checkpoint, whatever they hold."""
    files = {}
    for name in ("state.pt", "config.yaml"):
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(Manifest(files, facts or {}).text())


def instead(name: str, make: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def named(folder: Path) -> None:
    """A manifest, sealed as it should be, that names another file."""
    entry = {"bytes": 0, "sha256": "0" * 64}
    content = {"files": {"/dev/zero": entry, **Manifest.read(folder).files}, "facts": {}}
    manifest({"format": 2, "content": content, "sha256": content_digest(2, content)})(folder)


def manifest(content: Any) -> Change:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / "manifest.json").write_text(text) and None


def stated(state: Any) -> Change:
    """A state file of these bytes, or of another state, and a manifest that fits it."""

    def change(folder: Path) -> None:
        (folder / "state.pt").write_bytes(state if isinstance(state, bytes) else saved(state))
        seal(folder)

    return change


def pickled(content: bytes) -> Change:
    """A state file whose pickle is `content`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return stated(buffer.getvalue())


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def saved(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


DEEP = b"\x80\x02}K\x01" + b"]" * 100_000 + b"a" * 99_999 + b"s."
DEVICE = partial(os.symlink, "/dev/zero")
NOT_A_FILE = r"state\.pt: cannot be read \(Not a regular file\)"
NO_MANIFEST = r"manifest\.json: damaged, not a manifest"
ENTRY = '{"files":{"state.pt":{"bytes":1e999,"sha256":""}},"facts":{}}'
ENDLESS = f'{{"format":2,"content":{ENTRY},"sha256":""}}'
ATTACKS = {
    "code": saved({"trainer": Attack()}),
    "code in an old file": saved({"trainer": Attack()}, _use_new_zipfile_serialization=False),
    "a bare pickle": pickle.dumps(Attack()),
}
CASES: dict[str, tuple[Change, str]] = {
    "code": (stated(ATTACKS["code"]), r"state\.pt: holds posix\.system, and loading"),
    "a bare pickle": (stated(ATTACKS["a bare pickle"]), r"state\.pt: damaged, not a saved state"),
    "no run": (stated({"trainer": {"weights": {"a": 3}}}), "of something else|unknown to the mod"),
    "a list": (stated([1, 2]), r"state\.pt: holds a list, not a run's state"),
    "state a folder": (instead("state.pt", Path.mkdir), NOT_A_FILE),
    "pickle too deep": (pickled(DEEP), "of something else"),
    "state a fifo": (instead("state.pt", os.mkfifo), NOT_A_FILE),
    "manifest a fifo": (instead("manifest.json", os.mkfifo), r"manifest\.json: Not a regular file"),
    "state a device": (instead("state.pt", DEVICE), r"state\.pt: cannot be read \(A link"),
    "a device named": (named, r"manifest\.json: damaged, not a manifest \(it names other"),
    "an endless size": (manifest(ENDLESS), NO_MANIFEST),
    "manifest too deep": (manifest("[" * 100_000), NO_MANIFEST),
    "manifest of 2 MB": (manifest(" " * 2**21), r"manifest\.json: Larger than 1048576 bytes"),
}  # fmt: skip
