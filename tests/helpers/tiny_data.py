"""What makes each shipped experiment small enough for a test: words, and data in real formats."""

import datetime
import gzip
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from mpframe.config import CONF

_TEXTS = {path.stem: path.read_text("utf-8") for path in (CONF / "experiment").glob("*.yaml")}
# Each shipped experiment; the small size of one that has two has `_small` behind its name.
_SMALL = [f"{name}_small" for name, text in _TEXTS.items() if "${size:" in text]
EXPERIMENTS = sorted([*_TEXTS, *_SMALL])

# Behind each name, what makes it small. DATA is the folder of the fixture `tiny_data`. Images of
# CIFAR-10 are the copy in JPEG: its own format has 60,000 at least, which only large batches read.
_BERT = """dataset.batch_size=4 dataset.workers=0 dataset.vocab_size=200
    model.config.num_hidden_layers=1 model.config.hidden_size=24"""
_JPEG = "dataset=image_folder dataset.root=DATA/image_folder dataset.batch_size=8 dataset.workers=0"
_UNET = "model.width=4 dataset.image_size=16 dataset.workers=0"
_SCENES = "dataset.train=16 dataset.val=2 dataset.test=2 dataset.image_size=64 dataset.workers=0"
_SPEECH = "dataset.train=64 dataset.val=8 dataset.test=8 dataset.max_labels=3"
_ROWS = f"""
bert_classifier bert_classifier_small: dataset.root=DATA/text_folder {_BERT}
bert_spans bert_spans_small: {_BERT}
bikes: dataset.root=DATA/bikes
cifar10_adamw: {_JPEG} model.width=8
cifar10_resnet18: dataset.root=DATA/cifar10 dataset.batch_size=500 dataset.workers=0 model.width=2
cifar10_small: dataset.root=DATA/image_folder dataset.batch_size=8
detection_ssd: {_SCENES} dataset.batch_size=8 model.width=4
detection_ssd_small: {_SCENES} model.width=4
detection_torchvision: {_SCENES} dataset.batch_size=2
digits_gan:
digits_mlp:
fashion_mnist_cnn: dataset.root=DATA/fashion_mnist dataset.batch_size=8
fine_tuning: dataset.root=DATA/image_folder dataset.image_size=32 dataset.batch_size=8
    dataset.workers=0 init_from=null init_from_except=[]
fine_tuning_backbone: dataset.root=DATA/fashion_mnist dataset.batch_size=8
fine_tuning_digits: init_from=null init_from_except=[]
gpt: dataset.batch_size=2 dataset.context=8 dataset.workers=0 dataset.eval_windows=8 model.depth=1
gpt_small: dataset.batch_size=2 dataset.context=8 dataset.eval_windows=8
image_folder_resnet18: dataset.root=DATA/image_folder dataset.batch_size=8 dataset.workers=0
    model.width=8
ladder: {_JPEG} model.width=8
ladder_digits:
photographs_unet photographs_unet_small: dataset.root=DATA/mask_folder {_UNET}
rossmann: dataset.root=DATA/rossmann
shapes_unet shapes_unet_small: dataset.images=64 {_UNET}
speech_lstm: {_SPEECH} dataset.workers=0 model.hidden=16 model.layers=2
speech_lstm_small: {_SPEECH}
"""
_WORDS = re.findall(r"^([\w ]+):((?:.|\n )*)", _ROWS, re.M)
TINY = {name: words for names, words in _WORDS for name in names.split()}


def tiny(experiment: str, data: Path) -> list[str]:
    """The words that choose a shipped experiment and make it small; "" is what runs by default."""
    if not experiment:
        return []
    name = experiment if experiment in _TEXTS else experiment.removesuffix("_small")
    if "mpframe[text]" in _TEXTS[name]:  # Its YAML says what it needs.
        pytest.importorskip("transformers", reason="needs pip install mpframe[text]")
    size = [] if name == experiment else ["+size=small"]
    return [f"experiment={name}", *size, *TINY[experiment].replace("DATA", str(data)).split()]


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
