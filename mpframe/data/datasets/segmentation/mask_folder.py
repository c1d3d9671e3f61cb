"""Any tree of photographs and masks as a task of a class for each pixel."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.images.arrays import Normalize, spread
from mpframe.data.datasets.segmentation.pairs import Pair, list_pairs
from mpframe.data.datasets.segmentation.task import segmentation
from mpframe.data.facts import require_whole
from mpframe.data.keyed_random import keyed_uniform
from mpframe.data.task import Task
from mpframe.errors import ConfigError, DataError


def mask_folder(
    root: str = "data/photographs",
    image_size: int = 256,
    channels: int = 3,
    classes: int = 2,
    crops_per_image: int = 16,
    flip: bool = True,
    cache_bytes: int = 2**30,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Task:
    """The photographs under `root`: train/ to learn from, val/ to validate, test/ to test.

    Each part has the folders images/ and masks/, with a mask for each photograph: a PNG or BMP of
    the same name and size, whose pixels' numbers are classes (grey value, or place in the palette).
    test/ may be missing. Training draws crops at random places, new ones in each epoch; validation
    and test cover each photograph with evenly placed crops, of which neighbours may overlap.

    Args:
        root: the tree.
        image_size: pixels a side of a crop; no photograph is smaller.
        channels: 3 for RGB or 1 for grey; photographs are converted.
        classes: of the pixels, >= 2; 0 is the background.
        crops_per_image: how many crops of each photograph an epoch has.
        flip: mirror every second crop; training only.
        cache_bytes: decode once and keep all photographs in memory if they need no more than this;
            else decode each time (set dataset.workers then).
        mean: of each channel, of pixel values in 0..1; None: of the training photographs. Those
            that a trained model is measured on are normalised by the numbers it learned with.
        std: likewise.

    Raises:
        ConfigError: an option is out of its range.
        DataError: folders or files are missing, unreadable, or do not belong together.
    """
    _require_options(image_size, channels, classes, crops_per_image, cache_bytes)
    parts = _list_parts(Path(root))
    sizes = {name: _sizes(pairs, image_size) for name, pairs in parts.items()}
    pixels = sum(height * width for part in sizes.values() for height, width in part)
    keep = pixels * (channels + 1) <= cache_bytes
    photographs = {
        name: _Photographs(pairs, channels, classes, keep) for name, pairs in parts.items()
    }
    train, size = photographs["train"], image_size
    normalize = Normalize.given(mean, std, channels) or _measured(train, size)
    tiles = {name: Tiles(photographs[name], size, normalize, sizes[name]) for name in parts}
    return segmentation(
        RandomCrops(train, size, normalize, sizes["train"], crops_per_image, flip),
        tiles["val"],
        tiles.get("test"),
        preprocessing=normalize.described(size),
    )


def _measured(train: "_Photographs", size: int) -> Normalize:
    sample = range(len(train.pairs))[spread(len(train.pairs))]
    return Normalize.measured(
        torch.stack([_middle(train.read(number)[0], size) for number in sample])
    )


class Window(NamedTuple):
    """A square of a photograph: its first row and column, and whether it is mirrored."""

    photograph: int
    top: int
    left: int
    mirrored: bool = False


class Crops(Dataset[tuple[Tensor, Tensor]], ABC):
    """Squares of photographs, [channels, size, size] float32, and classes, [size, size] int64.

    Args:
        photographs: to cut from.
        size: pixels a side.
        normalize: brings pixels to mean 0 and variance 1.
        sizes: height and width of each photograph.
    """

    def __init__(
        self,
        photographs: "_Photographs",
        size: int,
        normalize: Normalize,
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self._photographs = photographs
        self._size = size
        self._normalize = normalize
        self._sizes = sizes

    @abstractmethod
    def windows(self, indices: Sequence[int]) -> list[Window]:
        """The squares of these samples."""

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples `indices`, ([N, channels, size, size] float32, [N, size, size] int64)."""
        cut = [self._cut(window) for window in self.windows(indices)]
        images, targets = zip(*cut, strict=True)
        return self._normalize(torch.stack(images)), torch.stack(targets).long()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.fetch_batch([range(len(self))[index]])
        return images[0], targets[0]

    @abstractmethod
    def __len__(self) -> int: ...

    def _cut(self, window: Window) -> tuple[Tensor, Tensor]:
        down = slice(window.top, window.top + self._size)
        right = slice(window.left, window.left + self._size)
        image, classes = (part[..., down, right] for part in self._photographs.read(window[0]))
        return (image.flip(-1), classes.flip(-1)) if window.mirrored else (image, classes)


class RandomCrops(Crops):
    """`each` crops of every photograph, at places that depend on (seed, epoch, index) alone."""

    def __init__(
        self,
        photographs: "_Photographs",
        size: int,
        normalize: Normalize,
        sizes: Sequence[tuple[int, int]],
        each: int,
        flip: bool,
    ) -> None:
        super().__init__(photographs, size, normalize, sizes)
        self._each = each
        self._flip = flip
        self._key = (0, 0)

    def unaugmented(self) -> "Tiles":
        """The same photographs in crops that cover them, for predictions."""
        return Tiles(self._photographs, self._size, self._normalize, self._sizes)

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the crops of an epoch."""
        self._key = (seed, epoch)

    def windows(self, indices: Sequence[int]) -> list[Window]:
        uniforms = keyed_uniform(3, *self._key, indices).tolist()
        return [self._window(*pair) for pair in zip(indices, uniforms, strict=True)]

    def _window(self, index: int, uniforms: Sequence[float]) -> Window:
        photograph = index // self._each
        top, left = (
            int(uniform * (side - self._size + 1))
            for uniform, side in zip(uniforms, self._sizes[photograph], strict=False)
        )
        return Window(photograph, top, left, self._flip and uniforms[2] < 0.5)

    def __len__(self) -> int:
        return len(self._sizes) * self._each


class Tiles(Crops):
    """As few crops as cover each photograph, evenly placed."""

    def windows(self, indices: Sequence[int]) -> list[Window]:
        tiles = [
            Window(photograph, top, left)
            for photograph, (height, width) in enumerate(self._sizes)
            for top in _starts(height, self._size)
            for left in _starts(width, self._size)
        ]
        return [tiles[index] for index in indices]

    def __len__(self) -> int:
        return sum(
            len(_starts(height, self._size)) * len(_starts(width, self._size))
            for height, width in self._sizes
        )


class _Photographs:
    """Reads photographs and masks, from memory if they are kept there."""

    def __init__(self, pairs: list[Pair], channels: int, classes: int, keep: bool) -> None:
        self.pairs = pairs
        self._shape = channels, classes
        self._kept = [pair.read(*self._shape) for pair in pairs] if keep else None

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """uint8 [channels, H, W] and uint8 [H, W]."""
        return self._kept[number] if self._kept else self.pairs[number].read(*self._shape)


def _starts(length: int, size: int) -> list[int]:
    """Where crops of `size` begin so that they cover `length`, from 0 to `length - size`."""
    gaps = max(1, -(-length // size) - 1)
    return sorted({(length - size) * place // gaps for place in range(gaps + 1)})


def _middle(image: Tensor, size: int) -> Tensor:
    top, left = ((side - size) // 2 for side in image.shape[1:])
    return image[:, top : top + size, left : left + size]


def _list_parts(root: Path) -> dict[str, list[Pair]]:
    folders = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    if folders[:2] != ["train", "val"]:
        raise DataError(
            f"dataset.root={root}: needs the folders train/ and val/, with images/ and masks/ in "
            "each; set dataset.root to such a tree"
        )
    return {name: list_pairs(root / name) for name in folders}


def _sizes(pairs: list[Pair], size: int) -> list[tuple[int, int]]:
    sizes = [pair.size() for pair in pairs]
    for pair, own in zip(pairs, sizes, strict=True):
        if min(own) < size:
            raise ConfigError(
                f"dataset.image_size={size}: {pair.image} is {own[1]} x {own[0]} pixels; use "
                f"dataset.image_size={min(own)} or less"
            )
    return sizes


def _require_options(
    image_size: int, channels: int, classes: int, crops_per_image: int, cache_bytes: int
) -> None:
    if channels not in (1, 3):
        raise ConfigError(f"dataset.channels={channels}: allowed are 1 (grey) and 3 (RGB)")
    require_whole("dataset.image_size", image_size, least=1)
    require_whole("dataset.classes", classes, least=2)
    require_whole("dataset.crops_per_image", crops_per_image, least=1)
    require_whole("dataset.cache_bytes", cache_bytes, least=0)
