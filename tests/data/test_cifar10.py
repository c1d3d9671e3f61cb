"""CIFAR-10 from small files made here, and files that want to run something."""

import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusal import refused
from time_limit import time_limit

from mpframe.core.errors import DataError
from mpframe.data import Normalize, cifar, cifar10
from mpframe.data.cifar import read_binary, read_python
from mpframe.data.samples import hold_out

COUNT = 20
NAMES = [*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "RECORDS", COUNT)


def content(part: int = 0) -> tuple[np.ndarray, list[int]]:
    """Pixels [COUNT, 3072] and labels of one file."""
    generator = np.random.default_rng(part)
    pixels = generator.integers(0, 256, (COUNT, 3072), dtype=np.uint8)
    return pixels, generator.integers(0, 10, COUNT).tolist()


def as_binary(part: int = 0) -> bytes:
    pixels, labels = content(part)
    return b"".join(
        bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)
    )


def python2_string(text: bytes) -> bytes:
    if len(text) < 256:
        return b"U" + bytes([len(text)]) + text
    return b"T" + struct.pack("<i", len(text)) + text


def as_python2(part: int = 0) -> bytes:
    """The published files' own spelling: protocol 2 as Python 2 wrote it."""
    pixels, labels = content(part)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09U\x01bq"
        b"\x0a\x87q\x0bRq\x0c(K\x01" + b"K" + bytes([COUNT]) + b"M\x00\x0c\x86q\x0dcnumpy\ndtype\n"
        b"q\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tq\x13b\x89" + python2_string(pixels.tobytes()) + b"q\x14tq\x15b"
    )
    text = python2_string
    told = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + b"]q\x05("
    numbers = b"".join(b"K" + bytes([label]) for label in labels) + b"e" + text(b"data")
    files = b"".join(text(b"a_%d.png" % number) for number in range(COUNT))
    names = text(b"filenames") + b"]q\x16(" + files + b"eu."
    return b"\x80\x02}q\x01(" + told + numbers + array + names


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], bytes]:
    """Take some bytes for a published file."""

    def published(content: bytes) -> bytes:
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        monkeypatch.setattr(cifar, "PUBLISHED", cifar.PUBLISHED | {digest})
        return content

    return published


@pytest.mark.parametrize(("version", "direct"), [("bin", True), ("py", False)])
def test_the_task_joins_five_files_and_tests_on_the_sixth(
    tmp_path: Path, version: str, direct: bool, publish: Callable[[bytes], bytes]
) -> None:
    folder = tmp_path / f"cifar-10-batches-{version}"
    folder.mkdir()
    for part, name in enumerate(NAMES):
        path = folder / (f"{name}.bin" if direct else name)
        path.write_bytes(as_binary(part) if direct else publish(as_python2(part)))
    assert direct or pickle.loads(as_python2(), encoding="latin1")["labels"] == content()[1]
    task: Any = cifar10(str(folder if direct else tmp_path))
    pixels = np.concatenate([content(part)[0] for part in range(6)])
    images = torch.from_numpy(pixels).view(-1, 3, 32, 32)
    targets = torch.tensor([label for part in range(6) for label in content(part)[1]])
    held = [*hold_out(targets[: 5 * COUNT], one_in=10), torch.arange(5 * COUNT, 6 * COUNT)]
    for part, indices in zip((task.train, task.val, task.test), held, strict=True):
        assert torch.equal(part.images, images[indices])
        assert torch.equal(part.targets, targets[indices])
        assert part.normalize == Normalize.measured(task.train.images)
    augments = [part.augment for part in (task.train, task.val, task.test)]
    assert augments == ["crop_flip", "none", "none"]


class RunsCommand:
    """What an attacker's object says on being unpickled: run this."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize(("protocol", "published"), [(0, True), (2, False), (4, True), (5, True)])
def test_an_attack_is_refused_and_not_run(
    tmp_path: Path, protocol: int, published: bool, publish: Callable[[bytes], bytes]
) -> None:
    """Not even with the digest of a published file."""
    witness = tmp_path / "it_ran"
    attack = pickle.dumps({"data": RunsCommand(witness)}, protocol)
    path = tmp_path / "data_batch_1"
    path.write_bytes(publish(attack) if published else attack)
    named = "it names 'posix system', which was not called"
    why = named if published else "its bytes are not the published ones"
    assert refused(DataError, read_python, path) == (
        f"{path}: refused, not a file of CIFAR-10's Python version "
        f"({why}); "
        "get cifar-10-python.tar.gz again, or use the binary version"
    )
    assert not witness.exists()
    pickle.loads(attack)  # The attack is a real one.
    assert witness.exists()


@pytest.mark.parametrize("read", [read_binary, read_python])
def test_what_is_no_data_file_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """A link is one."""
    text = refused(DataError, read, tmp_path / "gone")
    assert text.startswith(f"{tmp_path}/gone: cannot be read (No such file")
    os.mkfifo(tmp_path / "fifo")
    with time_limit(20):
        assert "Not a regular file" in refused(DataError, read, tmp_path / "fifo")
    (tmp_path / "stored").write_bytes(as_binary())
    (tmp_path / "link").symlink_to(tmp_path / "stored")
    assert len(read_binary(tmp_path / "link")[1]) == COUNT


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    for change in (-1, 1, -3073):
        path.write_bytes((as_binary() + b"\0")[: len(as_binary()) + change])
        assert refused(DataError, read_binary, path) == (
            f"{path}: must be 61460 bytes, 20 records of 3073, but has {61460 + change}; "
            "get the file again"
        )
    text = refused(DataError, cifar10, str(tmp_path))  # One file is not enough.
    assert text.startswith(f"dataset.root={tmp_path}: no complete CIFAR-10 (data_batch_1 to 5 and")
    assert f"CIFAR10 as C; C('{tmp_path}', download=True)" in text
    for name in NAMES:
        (tmp_path / f"{name}.bin").write_bytes(b"\x0b" + as_binary()[1:])
    text = refused(DataError, cifar10, str(tmp_path))
    assert "labels reach from 1 to 11, allowed is 0 to 9" in text
