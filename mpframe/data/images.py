"""Small images and their class numbers, fetched, augmented and normalised a batch at a time.

A loop in Python takes tens of microseconds for each sample, more than a network takes for a small
image. So `fetch_batch` does each stage once for the whole batch.

    digits         1797 grey images of 8 x 8, inside scikit-learn's wheel
    fashion_mnist  70,000 grey images of clothes, 28 x 28, in ten classes (Xiao et al. 2017), in
                   the idx format, from files that are untrusted
"""

import copy
import gzip
import math
import struct
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpframe.core.errors import ConfigError, DataError
from mpframe.data.samples import BatchDataset, draw_uniforms, hold_out
from mpframe.data.task import Task, classification, require_choice, require_facts, require_labels

AUGMENTATIONS = ("none", "crop", "crop_flip")


def shift_crop(images: Tensor, padding: int, uniforms: Tensor) -> Tensor:
    """Pad [N, C, H, W] with zeros, and cut windows of the old size at `uniforms` [N, 2] < 1."""
    count, _, height, width = images.shape
    top, left = (uniforms * (2 * padding + 1)).long().unbind(dim=1)
    padded = F.pad(images, [padding] * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, tops, lefts, H, W], a view
    return windows[torch.arange(count), :, top, left]


def mirror(images: Tensor, uniforms: Tensor) -> Tensor:
    """Swap left and right of the images [N, C, H, W] whose uniform [N] is below one half."""
    chosen = (uniforms < 0.5).nonzero().squeeze(1)
    return images.index_copy(0, chosen, images.index_select(0, chosen).flip(-1))


@dataclass(frozen=True)
class Normalize:
    """(pixel - mean) / std per channel, of pixel values in 0..1; std > 0."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def measured(cls, images: Tensor) -> "Normalize":
        """Measure at most 2,000 evenly spaced of [N, C, H, W]. A constant channel has std 1.

        The last digits do not depend on the number of threads: a run is refused data that are
        normalised by other numbers, and torch adds in an order that goes by its threads.
        """
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        sample = images[spread(len(images))]
        sample = sample.double() if sample.is_floating_point() else sample  # NumPy has no bfloat16.
        channels = [channel.numpy() for channel in sample.unbind(1)]
        mean = tuple(float(channel.mean(dtype=np.float64)) / top for channel in channels)
        return cls(mean, tuple(float(c.std(dtype=np.float64)) / top or 1.0 for c in channels))

    @classmethod
    def given(
        cls, mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
    ) -> "Normalize | None":
        """Check `dataset.mean` and `dataset.std`, and return None if they are both None."""
        if mean is None and std is None:
            return None
        means, stds = tuple(mean or ()), tuple(std or ())
        finite = all(map(math.isfinite, means + stds)) and min(stds, default=0.0) > 0
        if not finite or not len(means) == len(stds) == channels:
            raise ConfigError(
                f"dataset.mean={mean}, dataset.std={std}: must be null (measured) or {channels} "
                "numbers each, one per channel, of pixel values in 0..1, where std is above 0"
            )
        return cls(means, stds)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise [N, C, H, W], uint8 0..255 or floating 0..1, into float32."""
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        shift, factor = _shift_and_factor(tuple(self.mean), tuple(self.std), top)
        return images.float().sub(shift).mul_(factor)

    def described(
        self, side: int, brightest: float = 255.0, resize: str | None = None
    ) -> dict[str, Any]:
        """Describe what is done to a raw image, as JSON values, for `Task.preprocessing`.

        A raw image of values 0..`brightest`, `resize`d to `side` pixels a side, becomes
        (raw / brightest - mean) / std, per channel.
        """
        return {
            "layout": "NCHW",
            "channel_order": "RGB" if len(self.mean) == 3 else "grey",
            "size": [side, side],
            "resize": resize,
            "value_range": [0.0, brightest],
            "mean": list(self.mean),
            "std": list(self.std),
        }


@lru_cache
def _shift_and_factor(
    mean: tuple[float, ...], std: tuple[float, ...], top: float
) -> tuple[Tensor, Tensor]:
    """Return what is subtracted from pixels, and by what they are multiplied then, each [C, 1, 1].

    They are kept: making them takes longer than normalising a batch of small images.
    """
    both = torch.tensor([mean, std], dtype=torch.float32).mul_(top).view(2, -1, 1, 1)
    return both[0], both[1].reciprocal_()


def spread(count: int) -> slice:
    """Return evenly spaced places among `count`, at most 2,000: enough to represent all."""
    return slice(None, None, max(1, -(-count // 2000)))


class Images(BatchDataset):
    """Normalised images [C, H, W], float32, and their class numbers, int64, augmented by name."""

    def __init__(self, targets: Tensor, normalize: Normalize, augment: str) -> None:
        require_choice("augment", augment, AUGMENTATIONS)
        self.targets = targets.long()
        self.normalize = normalize
        self.augment = augment
        self._key = (0, 0)

    @abstractmethod
    def pixels(self, indices: Tensor) -> Tensor:
        """Return the raw images [len(indices), C, H, W], uint8 0..255 or floating 0..1."""

    def unaugmented(self) -> "Images":
        """Return the same images as they are, for predictions."""
        plain = copy.copy(self)
        plain.augment = "none"
        return plain

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the augmentation by (seed, epoch, index)."""
        self._key = (seed, epoch)

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return samples `indices` as one batch, ([N, C, H, W] float32, [N] int64)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        images = self.pixels(chosen)
        if self.augment != "none":
            uniforms = torch.from_numpy(draw_uniforms(3, *self._key, chosen.numpy()))
            # An eighth of the side, rounded down: 1 pixel for 8 x 8, 3 for 28 x 28, 4 for 32 x 32.
            images = shift_crop(images, max(1, images.shape[-1] // 8), uniforms[:, :2])
            if self.augment == "crop_flip":
                images = mirror(images, uniforms[:, 2])
        return self.normalize(images), self.targets.index_select(0, chosen)

    def __len__(self) -> int:
        return len(self.targets)


class ArrayImages(Images):
    """Images in memory, [N, C, H, W], uint8 0..255 or floating 0..1, and class numbers [N].

    `augment` is none, crop or crop_flip, or a ConfigError. DataError: their numbers differ.
    """

    def __init__(
        self, images: Tensor, targets: Tensor, normalize: Normalize, augment: str = "none"
    ) -> None:
        super().__init__(targets, normalize, augment)
        if len(images) != len(targets):
            raise DataError(
                f"dataset: {len(images)} images but {len(targets)} targets; give one for each"
            )
        self.images = images

    def pixels(self, indices: Tensor) -> Tensor:
        return self.images.index_select(0, indices)


def array_task(
    parts: Sequence[tuple[Tensor, Tensor]],
    augment: str,
    class_names: Sequence[str],
    brightest: float = 255.0,
) -> Task:
    """Return the task on the images and targets of training, validation and test."""
    normalize = Normalize.measured(parts[0][0])
    train, val, test = (
        ArrayImages(images, targets, normalize, name)
        for (images, targets), name in zip(parts, (augment, "none", "none"), strict=True)
    )
    preprocessing = normalize.described(parts[0][0].shape[-1], brightest)
    return classification(train, val, test, class_names, preprocessing)


_BRIGHTEST = 16.0


def digits(
    root: str | None = None,
    channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
    augment: str = "none",
) -> Task:
    """Return the digits: 1437 to train on, 180 to validate, 180 to test, always the same ones.

    `root` must be None, because they come with scikit-learn. `augment` is none, crop or crop_flip,
    for training. The other options are facts, which are compared. ConfigError: an option is
    something else.
    """
    if root is not None:
        raise ConfigError(
            f"dataset.root={root}: the digits come with scikit-learn; use dataset.root=null"
        )
    size, count = (image_size, 8), (classes, 10)
    require_facts("digits", channels=(channels, 1), image_size=size, classes=count)
    # scikit-learn's reader would import all of it, which takes half as long as torch.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(str(file), delimiter=","))  # 64 pixels and the digit
    images, targets = table[:, :-1].float().view(-1, 1, 8, 8) / _BRIGHTEST, table[:, -1].long()
    parts = [(images[part], targets[part]) for part in hold_out(targets, one_in=5, parts=2)]
    return array_task(parts, augment, [str(digit) for digit in range(10)], _BRIGHTEST)


_MOST_ITEMS = 2**20


def read_idx(path: Path, item: tuple[int, ...]) -> Tensor:
    """Read a file of unsigned bytes, plain or `.gz`: uint8 [N, *item], N at most 2^20.

    `item` is the shape of one item: (28, 28) for images, () for labels. DataError: the file is
    unreadable or damaged, or holds something else.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = struct.Struct(f">{2 + len(item)}I")
            magic, count, *shape = head.unpack(file.read(head.size))
            # 8 stands for unsigned bytes. The header limits what is unpacked.
            if magic != 0x800 + 1 + len(item) or tuple(shape) != item or count > _MOST_ITEMS:
                raise ValueError(f"its header is {magic:#x}, {count}, {shape}")
            size = count * math.prod(item)
            values = file.read(size + 1)  # One more, to see a file that holds more than it says.
            if not count or len(values) != size:
                raise ValueError(f"its header promises {size} bytes, and {len(values)} were read")
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise DataError(
            f"{path}: not a whole idx file of bytes {list(item)} ({error}); get the file again"
        ) from error
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(count, *item)


_FOLDERS = (".", "FashionMNIST/raw", "usr/share/datasets/fashion-mnist")
_NAMES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CLASSES = len(_NAMES)
_SIDE = 28


def fashion_mnist(
    root: str = "data",
    channels: int = 1,
    image_size: int = _SIDE,
    classes: int = _CLASSES,
    augment: str = "none",
) -> Task:
    """Return Fashion-MNIST: 500 of 6,000 training images of a class validate, always the same ones.

    `root` holds the four idx files, plain or .gz: directly, in torchvision's FashionMNIST/raw, or
    in usr/share/datasets/fashion-mnist of an unpacked Debian package. The sizes are facts, which
    are compared. ConfigError: one of them is wrong. DataError: files are missing or damaged.
    """
    size, count = (image_size, _SIDE), (classes, _CLASSES)
    require_facts("Fashion-MNIST", channels=(channels, 1), image_size=size, classes=count)
    images, targets = _read(root, "train")
    parts = [(images[part], targets[part]) for part in hold_out(targets, one_in=12)]
    return array_task([*parts, _read(root, "t10k")], augment, _NAMES)


def _read(root: str, split: str) -> tuple[Tensor, Tensor]:
    images = read_idx(_find(root, f"{split}-images-idx3-ubyte"), (_SIDE, _SIDE))
    path = _find(root, f"{split}-labels-idx1-ubyte")
    labels = read_idx(path, ())
    require_labels(path, labels, len(images), _CLASSES)
    return images.unsqueeze(1), labels


def _find(root: str, name: str) -> Path:
    folders = [Path(root) / folder for folder in _FOLDERS]
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    looked = ", ".join(map(str, folders))
    fetch = f"from torchvision.datasets import FashionMNIST as F; F({str(root)!r}, download=True)"
    raise DataError(
        f"dataset.root={root}: Fashion-MNIST's {name}[.gz] is in none of {looked}; get it with "
        f'python -c "{fetch}", or on Debian with apt-get install dataset-fashion-mnist and '
        "dataset.root=/usr/share/datasets/fashion-mnist"
    )
