"""What the integration tests share: runs in this process, and tiny data in each real format."""

import csv
import datetime
import gzip
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary

StartRun = Callable[..., Summary]


def train(folder: Path, *overrides: str) -> Summary:
    """Train as a command line would, in this process and into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _, composed = compose_named(["callbacks.progress_bar=null", *overrides])
    own = without_hydra(composed)
    return Run(check_config(own), own, folder).train()


@pytest.fixture
def start_run() -> StartRun:
    """Train as a command line would, in this process: start_run(folder, "dtype=fp32", ...)."""
    return train


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar tag of a run folder with its (step, value) pairs."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


@pytest.fixture(scope="module", autouse=True)
def modules_of_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forgets what the tests of a file imported from their folders: others use the same names."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(base):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not place.startswith(base)]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few samples for each dataset that reads files, in the formats those have."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    _idx(root / "fashion_mnist", random)
    _cifar(root / "cifar10" / "cifar-10-batches-bin", random)
    for split in ("train", "test"):
        for name in map(str, range(10)):
            folder = root / "image_folder" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:04d}.jpg")
    for name in ("art", "business", "politics", "sport", "tech"):
        folder = root / "text_folder" / name
        folder.mkdir(parents=True)
        for number in range(5):
            (folder / f"{number}.txt").write_text(f"{name} and more of {name} " * (number + 1))
    for split in ("train", "val"):
        for kind, shape, top in (("images", (40, 64, 3), 256), ("masks", (40, 64), 2)):
            folder = root / "mask_folder" / split / kind
            folder.mkdir(parents=True)
            pixels = random.integers(0, top, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "one.png")
    _tables(root)
    return root


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
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _idx(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir()
    for split, count in (("train", 16), ("t10k", 16)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        images = struct.pack(">IIII", 0x803, count, 28, 28) + pixels.tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        targets = struct.pack(">II", 0x801, count) + labels.tobytes()
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(targets))


def _cifar(folder: Path, random: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
