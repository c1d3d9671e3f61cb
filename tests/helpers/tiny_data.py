"""Tiny data in each real format."""

import datetime
import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from PIL import Image

from mpframe.config.locations import CONF


def write_tiny_data(root: Path) -> Path:
    """A few samples for each dataset that reads files, in the formats those have; the folder."""
    random = np.random.default_rng(0)
    _idx(root / "fashion_mnist", random)
    _cifar(root / "cifar10" / "cifar-10-batches-bin", random)
    for place in (f"{split}/{name}" for split in ("train", "test") for name in range(10)):
        for number in range(2):
            _image(root / "image_folder" / place / f"{number:04d}.jpg", random, (32, 32, 3), 256)
    for name in ("art", "business", "politics", "sport", "tech"):
        (folder := root / "text_folder" / name).mkdir(parents=True)
        for number in range(5):
            (folder / f"{number}.txt").write_text(f"{name} and more of {name} " * (number + 1))
    for split in ("train", "val"):
        _image(root / "mask_folder" / split / "images" / "one.png", random, (40, 64, 3), 256)
        _image(root / "mask_folder" / split / "masks" / "one.png", random, (40, 64), 2)
    _tables(root)
    return root


def _image(path: Path, random: np.random.Generator, shape: tuple[int, ...], top: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.integers(0, top, shape, dtype=np.uint8)).save(path)


def _tables(root: Path) -> None:
    """Rows with as many categories in each column as the YAML files say."""
    numbers = range(1500)
    bikes = OmegaConf.load(CONF / "dataset" / "bikes.yaml")
    columns = {name: [n % count for n in numbers] for name, count in bikes.categorical.items()}
    columns |= {name: [n / 7 for n in numbers] for name in bikes.continuous}
    _csv(root / "bikes" / bikes.file, columns | {bikes.target: [n + 1 for n in numbers]})

    first = datetime.date(2013, 1, 1)
    days = [first + datetime.timedelta(days=n * 13 // 20) for n in numbers]  # to September 2015
    sales = {"Store": [1 + n % 1115 for n in numbers], "Date": days, "Sales": list(numbers)}
    rossmann = OmegaConf.load(CONF / "dataset" / "rossmann.yaml")
    stores: dict[str, Any] = {"Store": range(1, 1116)}
    for name, count in rossmann.categorical.items():
        if name in ("DayOfWeek", "Promo", "StateHoliday", "SchoolHoliday"):
            sales[name] = [n % count for n in numbers]
        elif not name.startswith(("Store", "Date")) or name == "StoreType":
            stores[name] = [n % count for n in range(1115)]
    for name in rossmann.continuous:
        stores[name] = [n if n % 5 else "" for n in range(1115)]
    _csv(root / "rossmann" / "train.csv", sales)
    _csv(root / "rossmann" / "store.csv", stores)


def _csv(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    rows = [columns, *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


def _idx(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir()
    for split in ("train", "t10k"):
        pixels = random.integers(0, 256, (16, 28, 28), dtype=np.uint8)
        images = struct.pack(">IIII", 0x803, 16, 28, 28) + pixels.tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        targets = struct.pack(">II", 0x801, 16) + bytes(range(10)) + bytes(range(6))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(targets))


def _cifar(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
