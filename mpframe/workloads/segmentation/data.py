"""Images with a class for each pixel: photographs with masks, or generated pictures.

`mask_folder` reads any two folders of photographs and masks of the same names, which are untrusted.
`shapes` draws discs, squares and triangles, and needs no files. A sample is an image
[channels, H, W], float32, and its classes [H, W], int64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.data.image_files import MODES, decode, list_unlabelled, open_image
from mpframe.data.images import Normalize, spread
from mpframe.data.metrics import Dice, IoU
from mpframe.data.samples import Generated, draw_uniforms
from mpframe.data.task import Task, require_choice, require_counts, require_facts
from mpframe.workloads.segmentation.model import dice_cross_entropy

_MASK_FORMATS = ("PNG", "BMP")  # A JPEG does not keep numbers.
_ONE_NUMBER = ("1", "L", "P")  # black and white, grey, palette: Pillow's modes of 8 bits or fewer


class Pair(NamedTuple):
    """A photograph (JPEG, PNG, WebP, BMP) and its mask (PNG, BMP), whose numbers are classes."""

    image: str
    mask: str

    def size(self) -> tuple[int, int]:
        """Return height and width in pixels from the headers, which must agree."""
        with open_image(self.image) as image:
            width, height = image.size
        with open_image(self.mask, _MASK_FORMATS) as mask:
            wide, high = mask.size
        if (width, height) != (wide, high):
            raise DataError(
                f"{self.mask}: is {wide} x {high} pixels and {self.image} is {width} x {height}; "
                "give both the same size"
            )
        return height, width

    def read(self, channels: int, classes: int) -> tuple[Tensor, Tensor]:
        """Return the photograph, uint8 [channels, H, W], and its classes, uint8 [H, W]."""
        with open_image(self.mask, _MASK_FORMATS) as mask:
            if mask.mode not in _ONE_NUMBER:
                raise ValueError(f"its pixels are {mask.mode}, and not one number of 8 bits each")
            numbers = torch.from_numpy(np.asarray(mask).astype(np.uint8))
        if int(numbers.max()) >= classes:
            raise DataError(
                f"{self.mask}: holds {int(numbers.max())}, and dataset.classes={classes} allows 0 "
                f"to {classes - 1}; the number of a pixel is its class"
            )
        return decode(self.image, channels, None), numbers


def list_pairs(folder: Path) -> list[Pair]:
    """Return the pairs of `folder`/images and `folder`/masks, by name."""
    images, masks = (_list_by_name(folder / kind) for kind in ("images", "masks"))
    for name, path in (images | masks).items():
        if (name in images) != (name in masks):
            other = folder / ("masks" if name in images else "images")
            raise DataError(
                f"{path}: has no counterpart in {other}; a photograph and its mask have "
                "the same name"
            )
    return [Pair(images[name], masks[name]) for name in sorted(images)]


def _list_by_name(folder: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for path in list_unlabelled(folder):
        name = str(Path(path).relative_to(folder).with_suffix(""))
        if named.setdefault(name, path) != path:
            raise DataError(f"{path}: {named[name]} has the same name; remove one of them")
    return named


def segmentation(train: Dataset[Any], val: Dataset[Any], **rest: Any) -> Task:
    """Return a task with Dice loss and cross-entropy, and Dice and IoU without class 0."""
    return Task(train, val, dice_cross_entropy(), {"dice": Dice, "iou": IoU}, **rest)


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
    """Return the photographs under `root`: train/ to learn from, val/ to validate, test/ to test.

    Each part has the folders images/ and masks/, with a mask for each photograph: a PNG or BMP of
    the same name and size, whose pixels' numbers are classes (grey value, or place in the palette).
    test/ may be missing. Training draws crops at random places, new ones in each epoch. Validation
    and test cover each photograph with evenly placed crops, which may overlap. Photographs that
    need more than `cache_bytes` are decoded each time (set dataset.workers then). To measure a
    trained model on other photographs, give the `mean` and `std` that it learned with.

    ConfigError: an option is out of its range. DataError: folders or files are missing, unreadable,
    or do not belong together.
    """
    require_choice("channels", channels, MODES)
    require_counts(image_size=image_size, crops_per_image=crops_per_image)
    require_counts(2, classes=classes)
    require_counts(0, cache_bytes=cache_bytes)
    parts = _list_parts(Path(root))
    sizes = {name: _sizes(pairs, image_size) for name, pairs in parts.items()}
    pixels = sum(height * width for part in sizes.values() for height, width in part)
    keep = pixels * (channels + 1) <= cache_bytes
    read = {name: _Photographs(pairs, channels, classes, keep) for name, pairs in parts.items()}
    size, train = image_size, read["train"]
    normalize = Normalize.given(mean, std, channels) or _measure(train, size)
    tiles = {name: Tiles(read[name], size, normalize, sizes[name]) for name in parts}
    crops = RandomCrops(train, size, normalize, sizes["train"], crops_per_image, flip)
    how = normalize.described(size)
    return segmentation(crops, tiles["val"], test=tiles.get("test"), preprocessing=how)


def _measure(train: "_Photographs", size: int) -> Normalize:
    sample = range(len(train.pairs))[spread(len(train.pairs))]
    middles = [_cut_middle(train.read(number)[0], size) for number in sample]
    return Normalize.measured(torch.stack(middles))


class Window(NamedTuple):
    """The place of a square in a photograph."""

    photograph: int
    top: int  # row
    left: int  # column
    mirrored: bool = False


@dataclass(eq=False)
class Crops(Dataset[tuple[Tensor, Tensor]], ABC):
    """Squares of photographs, [channels, size, size] float32, and classes, [size, size] int64."""

    photographs: "_Photographs"
    size: int
    normalize: Normalize
    sizes: Sequence[tuple[int, int]]  # height and width of each photograph

    @abstractmethod
    def windows(self, indices: Sequence[int]) -> list[Window]:
        """Return the squares of these samples."""

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ([N, channels, size, size] float32, [N, size, size] int64)."""
        cut = [self._cut(window) for window in self.windows(indices)]
        images, targets = zip(*cut, strict=True)
        return self.normalize(torch.stack(images)), torch.stack(targets).long()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.fetch_batch([range(len(self))[index]])
        return images[0], targets[0]

    @abstractmethod
    def __len__(self) -> int: ...

    def _cut(self, window: Window) -> tuple[Tensor, Tensor]:
        down = slice(window.top, window.top + self.size)
        right = slice(window.left, window.left + self.size)
        image, classes = (part[..., down, right] for part in self.photographs.read(window[0]))
        return (image.flip(-1), classes.flip(-1)) if window.mirrored else (image, classes)


@dataclass(eq=False)
class RandomCrops(Crops):
    """Crops of every photograph at places that depend only on (seed, epoch, index)."""

    each: int  # crops of a photograph
    flip: bool
    _key = (0, 0)

    def unaugmented(self) -> "Tiles":
        """Return crops that cover the same photographs, for predictions."""
        return Tiles(self.photographs, self.size, self.normalize, self.sizes)

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the crops of an epoch."""
        self._key = (seed, epoch)

    def windows(self, indices: Sequence[int]) -> list[Window]:
        uniforms = draw_uniforms(3, *self._key, indices).tolist()
        return [self._window(*pair) for pair in zip(indices, uniforms, strict=True)]

    def _window(self, index: int, uniforms: Sequence[float]) -> Window:
        photograph = index // self.each
        top, left = (
            int(uniform * (side - self.size + 1))
            for uniform, side in zip(uniforms, self.sizes[photograph], strict=False)
        )
        return Window(photograph, top, left, self.flip and uniforms[2] < 0.5)

    def __len__(self) -> int:
        return len(self.sizes) * self.each


class Tiles(Crops):
    """The fewest crops that cover each photograph, evenly placed."""

    def windows(self, indices: Sequence[int]) -> list[Window]:
        return [self._tiles[index] for index in indices]

    def __len__(self) -> int:
        return len(self._tiles)

    @cached_property
    def _tiles(self) -> list[Window]:
        return [
            Window(photograph, top, left)
            for photograph, (height, width) in enumerate(self.sizes)
            for top in _starts(height, self.size)
            for left in _starts(width, self.size)
        ]


class _Photographs:
    """Photographs and masks, read from memory if they are kept there."""

    def __init__(self, pairs: list[Pair], channels: int, classes: int, keep: bool) -> None:
        self.pairs = pairs
        self._shape = channels, classes
        self._kept = [pair.read(*self._shape) for pair in pairs] if keep else None

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Return uint8 [channels, H, W] and uint8 [H, W]."""
        return self._kept[number] if self._kept else self.pairs[number].read(*self._shape)


def _starts(length: int, size: int) -> list[int]:
    """Return where crops of `size` begin so that they cover `length`, from 0 to `length - size`."""
    gaps = max(1, -(-length // size) - 1)
    return sorted({(length - size) * place // gaps for place in range(gaps + 1)})


def _cut_middle(image: Tensor, size: int) -> Tensor:
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
    for pair, (height, width) in zip(pairs, sizes, strict=True):
        if min(height, width) < size:
            raise ConfigError(
                f"dataset.image_size={size}: {pair.image} is {width} x {height} pixels; use "
                f"dataset.image_size={min(height, width)} or less"
            )
    return sizes


Array = NDArray[np.floating[Any]]

NAMES = ("background", "disc", "square", "triangle")
_NOISE = 0.15
_DRAWS = 5  # of a shape, besides its colour: whether it is there, kind, place (2), size
_LEAST_SIDE = 8


def shapes(
    image_size: int = 64,
    channels: int = 3,
    classes: int = len(NAMES),
    images: int = 2000,
    most_shapes: int = 4,
    cache_bytes: int = 2**28,
) -> Task:
    """Return pictures with a class for each pixel: background, disc, square, triangle.

    Each of the `most_shapes` is there with a probability of three quarters. At least one picture
    validates and tests. See conf/dataset/shapes.yaml.
    """
    require_facts("shapes", classes=(classes, len(NAMES)))
    require_counts(_LEAST_SIDE, image_size=image_size)
    require_counts(channels=channels, images=images, most_shapes=most_shapes)
    shape, few = (channels, image_size), max(1, images // 10)
    train, val, test = (
        Shapes(shape, most_shapes, count, (part,), _NOISE, cache_bytes)
        for part, count in enumerate((images, few, few))
    )
    return segmentation(train, val, test=test, class_names=NAMES)


class Shapes(Generated):
    """Pictures [channels, side, side], float32, about -1 to 1, and classes [side, side], int64."""

    def __init__(self, shape: tuple[int, int], most_shapes: int, *generated: Any) -> None:
        super().__init__(*generated)
        self._shape, self._most_shapes = shape, most_shapes

    def draw(self, index: int) -> tuple[Tensor, Tensor]:
        channels, side = self._shape
        each = _DRAWS + channels
        sizes = channels, self._most_shapes * each, channels * side**2
        background, rows, noise = np.split(self.uniforms(sum(sizes), index), np.cumsum(sizes)[:2])
        image = np.broadcast_to(background[:, None, None], (channels, side, side)).copy()
        classes = np.zeros((side, side), dtype=np.int64)
        middles = np.arange(side) + 0.5
        for there, kind, down, right, size, *colour in rows.reshape(-1, each):
            number = 1 + int(kind * len(_INSIDE))
            radius = (0.1 + 0.15 * size) * side
            places = middles[:, None] - down * side, middles - right * side
            inside = _INSIDE[number - 1](*places, radius) & (there < 0.75)
            image[:, inside] = np.array(colour)[:, None]
            classes[inside] = number
        image += _NOISE * (2 * noise.reshape(image.shape) - 1)
        return torch.from_numpy((2 * image - 1).astype(np.float32)), torch.from_numpy(classes)


# They take the pixels from a shape's middle to each pixel's, down [side, 1] and right [side].
_INSIDE: tuple[Callable[[Array, Array, float], NDArray[np.bool_]], ...] = (
    lambda down, right, radius: down**2 + right**2 < radius**2,  # a disc
    lambda down, right, radius: np.maximum(abs(down), abs(right)) < radius,  # a square
    # A triangle with its point up, wider below.
    lambda down, right, radius: (abs(down) < radius) & (2 * abs(right) < down + radius),
)
