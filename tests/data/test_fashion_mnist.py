"""Fashion-MNIST from small idx files made here, and every way such a file can be wrong."""

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST

from mpframe.core.errors import DataError
from mpframe.data import Normalize, fashion_mnist
from mpframe.data.images import read_idx
from mpframe.data.samples import hold_out

SPLITS = {"train": 30, "t10k": 10}


def idx_bytes(values: Tensor) -> bytes:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


def images_of(split: str) -> Tensor:
    generator = torch.Generator().manual_seed(SPLITS[split])
    return torch.randint(0, 256, (SPLITS[split], 28, 28), generator=generator).to(torch.uint8)


def labels_of(split: str) -> Tensor:
    return (torch.arange(SPLITS[split]) % 10).to(torch.uint8)


def write_all(folder: Path, *, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for kind, values in (("images-idx3", images_of(split)), ("labels-idx1", labels_of(split))):
            path, content = folder / f"{split}-{kind}-ubyte", idx_bytes(values)
            if packed:
                path.with_suffix(".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)


@pytest.mark.parametrize(
    ("layout", "packed"),
    [(".", True), ("FashionMNIST/raw", False), ("usr/share/datasets/fashion-mnist", True)],
)
def test_every_layout_is_read(tmp_path: Path, layout: str, packed: bool) -> None:
    write_all(tmp_path / layout, packed=packed)
    task: Any = fashion_mnist(str(tmp_path), augment="crop")
    train, val = hold_out(labels_of("train"), one_in=12)
    rows = ((task.train, "train", train), (task.val, "train", val), (task.test, "t10k", ...))
    for part, file, indices in rows:
        assert torch.equal(part.images, images_of(file).unsqueeze(1)[indices])
        assert torch.equal(part.targets, labels_of(file).long()[indices])
        assert part.normalize == Normalize.measured(task.train.images)
    assert (task.train.augment, task.val.augment, task.test.augment) == ("crop", "none", "none")
    assert list(task.class_names) == FashionMNIST.classes


def test_missing_files_say_where_they_were_looked_for_and_how_to_get_them(tmp_path: Path) -> None:
    root = str(tmp_path / "none")
    with pytest.raises(DataError) as caught:
        fashion_mnist(root)
    text = str(caught.value)
    assert text.startswith(f"dataset.root={root}: Fashion-MNIST's train-images-idx3-ubyte[.gz] is")
    assert f"{root}/FashionMNIST/raw" in text
    assert f"FashionMNIST as F; F({root!r}, download=True)" in text
    assert "apt-get install dataset-fashion-mnist" in text


IMAGES = idx_bytes(torch.zeros(3, 28, 28, dtype=torch.uint8))
HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 28, 28)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (IMAGES[:10], "it does not begin with 00 00 08 03 and 3 sizes"),
        (bytes([0, 0, 9, 3]) + IMAGES[4:], "it does not begin with"),
        (bytes([0, 0, 8, 1]) + IMAGES[4:], "it does not begin with"),
        (IMAGES[:-1], "its header promises 2352 bytes of values and it holds only 2351"),
        (IMAGES + b"\0", "its header promises 2352 bytes of values and it holds more"),
        (idx_bytes(torch.zeros(3, 28, 29, dtype=torch.uint8)), "it holds 3 x 28 x 29 values"),
        (idx_bytes(torch.zeros(0, 28, 28, dtype=torch.uint8)), "it holds 0 x 28 x 28 values"),
        (HUGE, "it holds 4294967295 x 28 x 28 values, wanted is N x 28 x 28 with N up to 2^20"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path, (28, 28))
    assert str(caught.value).startswith(f"{path}: not a whole idx file: {text}")
    assert str(caught.value).endswith("; get the file again")


PACKED = gzip.compress(IMAGES)


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip at all",
        PACKED[: len(PACKED) // 2],
        PACKED[:12] + b"\xff\xff\xff\xff" + PACKED[16:],
        PACKED[:-8] + bytes(8),
    ],
    ids=["other format", "cut short", "garbled", "checksum"],
)
def test_damaged_gz_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read \(.*\); get the file again") as caught:
        read_idx(path, (28, 28))
    assert "\n" not in str(caught.value)


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


def test_labels_must_fit_the_images(tmp_path: Path) -> None:
    write_all(tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(labels_of("t10k")))
    with pytest.raises(DataError, match=f"^{path}: 10 labels for 30 images; get the files again$"):
        fashion_mnist(str(tmp_path))
    labels = labels_of("train")
    labels[4] = 10
    path.write_bytes(idx_bytes(labels))
    with pytest.raises(DataError, match=f"^{path}: labels reach from 0 to 10, allowed is 0 to 9;"):
        fashion_mnist(str(tmp_path))
