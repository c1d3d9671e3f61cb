"""CIFAR-10 and Fashion-MNIST from small files made here, also such as want to run something."""

import gzip
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
from fixtures import refused, time_limit
from torch import Tensor
from torchvision.datasets import FashionMNIST

from mpframe.core.errors import DataError
from mpframe.data import Normalize, cifar, cifar10, fashion_mnist
from mpframe.data.cifar import read_binary, read_python
from mpframe.data.images import read_idx
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


SPLITS = {"train": 30, "t10k": 10}


def idx_bytes(values: Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


def part_of(split: str) -> tuple[Tensor, Tensor]:
    """Images and labels of one split."""
    random = torch.Generator().manual_seed(SPLITS[split])
    images = torch.randint(0, 256, (SPLITS[split], 28, 28), generator=random).to(torch.uint8)
    return images, (torch.arange(SPLITS[split]) % 10).to(torch.uint8)


def write_all(folder: Path, *, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for kind, values in zip(("images-idx3", "labels-idx1"), part_of(split), strict=True):
            path, content = folder / f"{split}-{kind}-ubyte", idx_bytes(values)
            if packed:
                path, content = path.with_suffix(".gz"), gzip.compress(content)
            path.write_bytes(content)


@pytest.mark.parametrize(
    ("layout", "packed"),
    [(".", True), ("FashionMNIST/raw", False), ("usr/share/datasets/fashion-mnist", True)],
)
def test_every_layout_is_read(tmp_path: Path, layout: str, packed: bool) -> None:
    write_all(tmp_path / layout, packed=packed)
    task: Any = fashion_mnist(str(tmp_path), augment="crop")
    train, val = hold_out(part_of("train")[1], one_in=12)
    rows = ((task.train, "train", train), (task.val, "train", val), (task.test, "t10k", ...))
    for part, file, indices in rows:
        images, labels = part_of(file)
        assert torch.equal(part.images, images.unsqueeze(1)[indices])
        assert torch.equal(part.targets, labels.long()[indices])
        assert part.normalize == Normalize.measured(task.train.images)
    assert (task.train.augment, task.val.augment, task.test.augment) == ("crop", "none", "none")
    assert list(task.class_names) == FashionMNIST.classes


IMAGES = idx_bytes(torch.zeros(3, 28, 28, dtype=torch.uint8))
HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 28, 28)
PACKED = gzip.compress(IMAGES)
WHOLE, READ = "not a whole idx file: ", "cannot be read ("


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (IMAGES[:10], f"{WHOLE}it does not begin with 00 00 08 03 and 3 sizes"),
        (bytes([0, 0, 9, 3]) + IMAGES[4:], f"{WHOLE}it does not begin with"),
        (bytes([0, 0, 8, 1]) + IMAGES[4:], f"{WHOLE}it does not begin with"),
        (IMAGES[:-1], f"{WHOLE}its header promises 2352 bytes of values and it holds only 2351"),
        (IMAGES + b"\0", f"{WHOLE}its header promises 2352 bytes of values and it holds more"),
        (idx_bytes(torch.zeros(3, 28, 29).byte()), f"{WHOLE}it holds 3 x 28 x 29 values"),
        (idx_bytes(torch.zeros(0, 28, 28).byte()), f"{WHOLE}it holds 0 x 28 x 28 values"),
        (HUGE, f"{WHOLE}it holds 4294967295 x 28 x 28 values, wanted is N x 28 x 28 with N up to"),
        (b"not gzip at all", READ),
        (PACKED[: len(PACKED) // 2], READ),
        (PACKED[:12] + b"\xff\xff\xff\xff" + PACKED[16:], READ),
        (PACKED[:-8] + bytes(8), READ),  # the checksum
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / ("file.gz" if text == READ else "file")
    path.write_bytes(content)
    said = refused(DataError, read_idx, path, (28, 28))
    assert said.startswith(f"{path}: {text}")
    assert said.endswith("; get the file again")


def test_a_small_file_cannot_unpack_into_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(IMAGES + bytes(2**24)))  # 16 MiB in about 16 kB.
    reads: list[int | None] = []

    class Counting(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(gzip, "open", lambda file: Counting(file))
    with pytest.raises(DataError, match="and it holds more"):
        read_idx(path, (28, 28))
    assert reads == [16, 3 * 28 * 28 + 1]


def test_files_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    root = str(tmp_path / "none")
    text = refused(DataError, fashion_mnist, root)
    assert text.startswith(f"dataset.root={root}: Fashion-MNIST's train-images-idx3-ubyte[.gz] is")
    assert f"{root}/FashionMNIST/raw" in text
    assert f"FashionMNIST as F; F({root!r}, download=True)" in text
    write_all(tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    for labels, said in (
        (part_of("t10k")[1], "10 labels for 30 images; get the files again"),
        (part_of("train")[1] + 1, "labels reach from 1 to 10, allowed is 0 to 9;"),
    ):
        path.write_bytes(idx_bytes(labels))
        assert refused(DataError, fashion_mnist, str(tmp_path)).startswith(f"{path}: {said}")
