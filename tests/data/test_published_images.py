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
from fixtures import Patch, refused, time_limit
from torch import Tensor
from torchvision.datasets import FashionMNIST

from mpframe.core.errors import DataError
from mpframe.data import Normalize, cifar, cifar10, fashion_mnist
from mpframe.data.cifar import read_binary, read_python
from mpframe.data.images import read_idx
from mpframe.data.samples import hold_out

COUNT = 20  # images in each file
NAMES = [*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]


@pytest.fixture
def publish(monkeypatch: Patch) -> Callable[..., None]:
    """Takes these contents of small files for the published ones."""

    def digests(*contents: bytes) -> None:
        known = {hashlib.md5(own, usedforsecurity=False).hexdigest() for own in contents}
        monkeypatch.setattr(cifar, "PUBLISHED", known)

    monkeypatch.setattr(cifar, "RECORDS", COUNT)
    return digests


def content(part: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [COUNT, 3072] and labels of one file."""
    own = np.random.default_rng(part)
    pixels = own.integers(0, 256, (COUNT, 3072), dtype=np.uint8)
    return pixels, own.integers(0, 10, COUNT, dtype=np.uint8)


def as_binary(part: int = 0) -> bytes:
    pixels, labels = content(part)
    return np.column_stack([labels, pixels]).tobytes()


def as_python2(part: int = 0) -> bytes:
    """The published files' own spelling: protocol 2 as Python 2 wrote it."""
    pixels, labels = content(part)
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        b"K%cM\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T%btb"
    ) % (COUNT, struct.pack("<i", pixels.nbytes) + pixels.tobytes())
    return b"\x80\x02}(U\x06labels](" + numbers + b"eU\x04data" + array + b"u."


def assert_parts(task: Any, images: list[Tensor], targets: list[Tensor], augment: str) -> None:
    """They are the training, the validation and the test part."""
    parts = (task.train, task.val, task.test)
    for part, own, labels in zip(parts, images, targets, strict=True):
        assert torch.equal(part.images, own)
        assert torch.equal(part.targets, labels.long())
        assert part.normalize == Normalize.measured(task.train.images)
    assert [part.augment for part in parts] == [augment, "none", "none"]


@pytest.mark.parametrize("version", ["bin", "py"])
def test_the_task_joins_five_files_and_tests_on_the_sixth(
    tmp_path: Path, version: str, publish: Callable[..., None]
) -> None:
    folder, binary = tmp_path / f"cifar-10-batches-{version}", version == "bin"
    folder.mkdir()
    files = [as_binary(part) if binary else as_python2(part) for part in range(6)]
    publish(*files)
    for name, file in zip(NAMES, files, strict=True):
        (folder / (f"{name}.bin" if binary else name)).write_bytes(file)
    task: Any = cifar10(str(folder if binary else tmp_path))
    pixels, labels = map(np.concatenate, zip(*map(content, range(6)), strict=True))
    images, targets = torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels).long()
    held = [*hold_out(targets[: 5 * COUNT], one_in=10), torch.arange(5 * COUNT, 6 * COUNT)]
    assert_parts(task, [images[own] for own in held], [targets[own] for own in held], "crop_flip")


@pytest.mark.parametrize(("protocol", "published"), [(0, True), (2, False), (5, True)])
def test_an_attack_is_refused_and_not_run(
    tmp_path: Path, protocol: int, published: bool, publish: Callable[..., None]
) -> None:
    """Not even with the digest of a published file."""
    path, witness = tmp_path / "data_batch_1", tmp_path / "it_ran"
    call = os.system, (f"touch {witness}",)
    attack = pickle.dumps(type("Attacker", (), {"__reduce__": lambda _: call})(), protocol)
    path.write_bytes(attack)
    if published:
        publish(attack)
    named = "it names 'posix system', which was not called"
    why = named if published else "its bytes are not the published ones"
    assert refused(DataError, read_python, path) == (
        f"{path}: refused, not a file of CIFAR-10's Python version ({why}); "
        "get cifar-10-python.tar.gz again, or use the binary version"
    )
    assert not witness.exists()
    pickle.loads(attack)  # The attack is a real one.
    assert witness.exists()


@pytest.mark.usefixtures("publish")
def test_files_of_cifar_that_do_not_fit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for read in (read_binary, read_python):
        with time_limit(20):
            assert "Not a regular file" in refused(OSError, read, tmp_path / "fifo")
    path = tmp_path / "data_batch_1.bin"
    for change in (-1, 1):
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
    assert "to 11, and must have one from 0 to 9 for each of 2" in refused(
        DataError, cifar10, str(tmp_path)
    )


SPLITS = {"train": 30, "t10k": 10}


def idx_bytes(values: Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


def part_of(split: str) -> tuple[Tensor, Tensor]:
    count = SPLITS[split]
    random = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 28, 28), generator=random)
    return images.byte(), (torch.arange(count) % 10).byte()


def write_all(folder: Path, pack: Any = bytes, ending: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for kind, values in zip(("images-idx3", "labels-idx1"), part_of(split), strict=True):
            path = folder / f"{split}-{kind}-ubyte{ending}"
            path.write_bytes(pack(idx_bytes(values)))


@pytest.mark.parametrize("layout", [".", "FashionMNIST/raw", "usr/share/datasets/fashion-mnist"])
def test_every_layout_is_read(tmp_path: Path, layout: str) -> None:
    write_all(tmp_path / layout, *(() if "raw" in layout else (gzip.compress, ".gz")))
    task: Any = fashion_mnist(str(tmp_path), augment="crop")
    (images, labels), (test_images, test_labels) = map(part_of, SPLITS)
    held = hold_out(labels, one_in=12)
    expected = [*(images[own] for own in held), test_images]
    targets = [*(labels[own] for own in held), test_labels]
    assert_parts(task, [own.unsqueeze(1) for own in expected], targets, "crop")
    assert list(task.class_names) == FashionMNIST.classes


IMAGES = idx_bytes(torch.zeros(3, 28, 28, dtype=torch.uint8))
PACKED, READ = gzip.compress(IMAGES), ""


def test_files_of_fashion_mnist_that_do_not_fit(tmp_path: Path) -> None:
    for content, text in (
        (IMAGES[:10], "unpack requires a buffer of 16 bytes"),
        (bytes([0, 0, 9, 3]) + IMAGES[4:], "its header is 0x903, 3, [28, 28]"),
        (bytes([0, 0, 8, 1]) + IMAGES[4:], "its header is 0x801"),
        (IMAGES[:-1], "its header promises 2352 bytes, and 2351 were read"),
        (IMAGES + b"\0", "its header promises 2352 bytes, and 2353 were read"),
        (idx_bytes(torch.zeros(0, 28, 28).byte()), "its header promises 0 bytes"),
        (IMAGES[:4] + b"\xff" * 4 + IMAGES[8:], "its header is 0x803, 4294967295, [28, 28]"),
        (b"not gzip at all", READ),
        (PACKED[: len(PACKED) // 2], READ),
        (PACKED[:-8] + bytes(8), READ),  # the checksum
    ):
        path = tmp_path / ("file.gz" if text == READ else "file")
        path.write_bytes(content)
        said = refused(DataError, read_idx, path, (28, 28))
        assert said.startswith(f"{path}: not a whole idx file of bytes [28, 28] ({text}")
        assert said.endswith("; get the file again")
    root = str(tmp_path / "none")
    text = refused(DataError, fashion_mnist, root)
    assert text.startswith(f"dataset.root={root}: Fashion-MNIST's train-images-idx3-ubyte[.gz] is")
    assert f"F({root!r}, download=True)" in text
    write_all(tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    for labels, said in (
        (
            part_of("t10k")[1],
            "has 10 labels from 0 to 9, and must have one from 0 to 9 for each of 3",
        ),
        (part_of("train")[1] + 1, "has 30 labels from 1 to 10, and must have one from 0 to 9"),
    ):
        path.write_bytes(idx_bytes(labels))
        assert refused(DataError, fashion_mnist, str(tmp_path)).startswith(f"{path}: {said}")


def test_a_small_file_cannot_unpack_into_a_large_one(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(IMAGES + bytes(2**24)))  # 16 MiB in about 16 kB.
    read, sizes = gzip.GzipFile.read, list[int]()
    noted = lambda file, size: sizes.append(size) or read(file, size)  # noqa: E731
    monkeypatch.setattr(gzip.GzipFile, "read", noted)
    assert "2352 bytes, and 2353 were read" in refused(DataError, read_idx, path, (28, 28))
    assert sizes == [16, 3 * 28 * 28 + 1]
