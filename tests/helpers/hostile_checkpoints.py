"""Checkpoints made to hang or to break their reader, and what is said of each."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpframe.checkpoint.folder import Manifest, content_digest, sha256_of

Change = Callable[[Path], None]


def resealed(change: Change) -> Change:
    """The change, and a manifest that fits it."""

    def changed(folder: Path) -> None:
        change(folder)
        names = ("state.pt", "config.yaml")
        files = {
            n: {"bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)}
            for n in names
        }
        (folder / "manifest.json").write_text(Manifest(files, {}).text())

    return changed


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(target)

    return change


def named(name: str, size: Any = 0) -> Change:
    """A manifest, sealed as it should be, that names another file."""

    def change(folder: Path) -> None:
        entry = {"bytes": size, "sha256": "0" * 64}
        content = {
            "files": {name: entry, **Manifest.read(folder).files},
            "facts": {},
        }
        sealed = {"format": 2, "content": content, "sha256": content_digest(2, content)}
        (folder / "manifest.json").write_text(json.dumps(sealed))

    return change


def manifest(text: str | bytes) -> Change:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "manifest.json").write_bytes(content) and None


def pickled(content: bytes) -> Change:
    """A state file whose pickle is `content`, resealed."""

    def change(folder: Path) -> None:
        with zipfile.ZipFile(folder / "state.pt", "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")

    return resealed(change)


def bytes_of_state(content: bytes) -> Change:
    return resealed(lambda folder: (folder / "state.pt").write_bytes(content) and None)


def a_folder(folder: Path) -> None:
    (folder / "state.pt").unlink()
    (folder / "state.pt").mkdir()


def stated(state: Any) -> Change:
    return resealed(lambda folder: torch.save(state, folder / "state.pt"))


def doubled() -> list[Any]:
    """Sixty lists that unfold to 2^60."""
    held: list[Any] = []
    for _ in range(60):
        held = [held, held]
    return held


def deep() -> bytes:
    """A pickle of a dict that holds a list in a list, a hundred thousand times."""
    return b"\x80\x02}K\x01" + b"]" * 100_000 + b"a" * 99_999 + b"s."


TORN = r"state\.pt: damaged, not a saved state"
ZEROES = b"\x80\x02" + b"N0" * 20_000_000 + b"."
CASES: dict[str, tuple[Change, str]] = {
    "state a fifo": (fifo("state.pt"), r"state\.pt: cannot be read \(Not a regular file\)"),
    "config a fifo": (fifo("config.yaml"), r"config\.yaml: cannot be read \(Not a regular file\)"),
    "manifest a fifo": (fifo("manifest.json"), r"manifest\.json: Not a regular file"),
    "state a link": (link("state.pt", "../state.pt"), r"state\.pt: cannot be read \(A link"),
    "state a device": (link("state.pt", "/dev/zero"), r"state\.pt: cannot be read \(A link"),
    "manifest a link": (link("manifest.json", "../manifest.json"), r"manifest\.json: A link"),
    "a device named": (named("/dev/zero"), r"manifest\.json: damaged, it names '/dev/zero'"),
    "a folder left": (named("../../x"), r"manifest\.json: damaged, it names '\.\./\.\./x'"),
    "the folder named": (named("."), r"manifest\.json: damaged, it names '\.'"),
    "nul named": (named("a\0b"), r"manifest\.json: damaged, it names 'a\\x00b'"),
    "an endless size": (
        manifest('{"format":2,"content":{"files":{"state.pt":{"bytes":1e999,"sha256":""}},'
                 '"facts":{}},"sha256":""}'), r"manifest\.json: damaged, not a manifest",
    ),
    "manifest too deep": (manifest("[" * 100_000), r"manifest\.json: damaged, not a manifest"),
    "manifest not text": (manifest(b"\xff\xfe\0\xff"), r"manifest\.json: damaged, not a manifest"),
    "manifest surrogates": (
        manifest('{"format":2,"content":{"files":{},"facts":{"a":"\\ud800"}},"sha256":""}'),
        r"manifest\.json: damaged",
    ),
    "manifest of 2 MB": (manifest(" " * 2**21), r"manifest\.json: Larger than 1048576 bytes"),
    "state a folder": (
        a_folder,
        r"state\.pt: cannot be read \(Not a regular file\)",
    ),
    "pickle empty": (pickled(b""), TORN),
    "pickle cut": (pickled(pickle.dumps({"a": 1}, 2)[:-1]), TORN),
    "pickle pops nothing": (pickled(b"\x80\x02aaa."), TORN),
    "pickle of a number": (pickled(b"\x80\x02K\x01."), r"state\.pt: holds a int"),
    "pickle of wild calls": (
        pickled(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nNR."), TORN,
    ),
    "pickle asks for memory": (
        pickled(b"\x80\x02\x8a" + b"\xff" + b"\x01" * 255 + b"."), r"state\.pt: ",
    ),
    "pickle too deep": (pickled(deep()), r"state\.pt: refused, nested"),
    "pickle of no-ops": (pickled(ZEROES), r"state\.pt: refused, its pickle has 4\d{7} bytes"),
    "not a zip": (bytes_of_state(b"PK\5\6" + bytes(18)), r"state\.pt: "),
    "zip cut": (bytes_of_state(b"PK\3\4" + bytes(300)), TORN),
    "doubled lists": (stated({"a": doubled()}), r"state\.pt: refused, nested"),
    "a list in itself": (stated({"a": (ring := [], ring.append(ring))}), r"refused, nested"),
}  # fmt: skip
