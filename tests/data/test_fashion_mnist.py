"""Fashion-MNIST from small idx files made here, and every way such a file can be wrong."""

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refused
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
