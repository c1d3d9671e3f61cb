"""Images with a class for each pixel: photographs with masks, or generated pictures.

`mask_folder` reads any two folders of photographs and masks of the same names, which are untrusted
input. `shapes` draws discs, squares and triangles of any size and needs no files. A sample is an
image [channels, H, W], float32, and its classes [H, W], int64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.ranges import require_whole
from mpframe.data.facts import require_facts
from mpframe.data.image_files import decode, list_unlabelled, opened
from mpframe.data.images import Normalize, spread
from mpframe.data.loading import keyed_uniform
from mpframe.data.metrics import Dice, IoU
from mpframe.data.samples import Generated
from mpframe.data.task import Task
from mpframe.workloads.segmentation.model import dice_cross_entropy

_MASK_FORMATS = ("PNG", "BMP")  # A JPEG does not keep numbers.
_ONE_NUMBER = ("1", "L", "P")  # black and white, grey, palette: Pillow's modes of 8 bits or fewer


class Pair(NamedTuple):
    """A photograph (JPEG, PNG, WebP, BMP) and its mask (PNG, BMP), whose numbers are classes."""

    image: str
    mask: str

    def size(self) -> tuple[int, int]:
        """Return height and width in pixels from the headers, which must agree."""
        with opened(self.image) as image:
            width, height = image.size
        with opened(self.mask, _MASK_FORMATS) as mask:
            wide, high = mask.size
        if (width, height) != (wide, high):
            raise DataError(
                f"{self.mask}: is {wide} x {high} pixels and {self.image} is {width} x {height}; "
                "give both the same size"
            )
        return height, width

    def read(self, channels: int, classes: int) -> tuple[Tensor, Tensor]:
        """Return the photograph, uint8 [channels, H, W], and its classes, uint8 [H, W]."""
        with opened(self.mask, _MASK_FORMATS) as mask:
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
    images, masks = (_by_name(folder / kind) for kind in ("images", "masks"))
    for name, path in (images | masks).items():
        if (name in images) != (name in masks):
            other = folder / ("masks" if name in images else "images")
            raise DataError(
                f"{path}: has no counterpart in {other}; a photograph and its mask have "
                "the same name"
            )
    return [Pair(images[name], masks[name]) for name in sorted(images)]


def _by_name(folder: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for path in list_unlabelled(folder):
        name = str(Path(path).relative_to(folder).with_suffix(""))
        if named.setdefault(name, path) != path:
            raise DataError(f"{path}: {named[name]} has the same name; remove one of them")
    return named


def segmentation(
    train: Dataset[Any],
    val: Dataset[Any],
    test: Dataset[Any] | None = None,
    **described: Any,
) -> Task:
    """Dice loss and cross-entropy on logits [N, classes, H, W]; Dice and IoU, without class 0."""
    metrics = {"dice": Dice, "iou": IoU}
    return Task(train, val, dice_cross_entropy(), metrics, test=test, **described)


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
    test/ may be missing. Training draws crops at random places, new ones in each epoch; validation
    and test cover each photograph with evenly placed crops, of which neighbours may overlap. See
    conf/dataset/mask_folder.yaml. Photographs that need more than `cache_bytes` are decoded each
    time (set dataset.workers then). Give `mean` and `std` that a trained model learned with to
    measure it on other photographs.

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


@dataclass(eq=False)
class Crops(Dataset[tuple[Tensor, Tensor]], ABC):
    """Squares of photographs, [channels, size, size] float32, and classes, [size, size] int64.

    `sizes` has the height and width of each photograph.
    """

    photographs: "_Photographs"
    size: int
    normalize: Normalize
    sizes: Sequence[tuple[int, int]]

    @abstractmethod
    def windows(self, indices: Sequence[int]) -> list[Window]:
        """Return the squares of these samples."""

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return samples `indices`, ([N, channels, size, size] float32, [N, size, size] int64)."""
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
    """`each` crops of every photograph, at places that depend only on (seed, epoch, index)."""

    each: int
    flip: bool
    _key = (0, 0)

    def unaugmented(self) -> "Tiles":
        """Return the same photographs in crops that cover them, for predictions."""
        return Tiles(self.photographs, self.size, self.normalize, self.sizes)

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the crops of an epoch."""
        self._key = (seed, epoch)

    def windows(self, indices: Sequence[int]) -> list[Window]:
        uniforms = keyed_uniform(3, *self._key, indices).tolist()
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
    """As few crops as cover each photograph, evenly placed."""

    def windows(self, indices: Sequence[int]) -> list[Window]:
        tiles = [
            Window(photograph, top, left)
            for photograph, (height, width) in enumerate(self.sizes)
            for top in _starts(height, self.size)
            for left in _starts(width, self.size)
        ]
        return [tiles[index] for index in indices]

    def __len__(self) -> int:
        return sum(
            len(_starts(height, self.size)) * len(_starts(width, self.size))
            for height, width in self.sizes
        )


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
    for pair, (height, width) in zip(pairs, sizes, strict=True):
        if min(height, width) < size:
            raise ConfigError(
                f"dataset.image_size={size}: {pair.image} is {width} x {height} pixels; use "
                f"dataset.image_size={min(height, width)} or less"
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

    See conf/dataset/shapes.yaml; each of the `most_shapes` is there with a probability of three
    quarters, and at least one picture validates and tests.
    """
    require_facts("shapes", classes=(classes, len(NAMES)))
    require_whole("dataset.image_size", image_size, least=_LEAST_SIDE)
    require_whole("dataset.channels", channels, least=1)
    require_whole("dataset.images", images, least=1)
    require_whole("dataset.most_shapes", most_shapes, least=1)
    train, val, test = (
        Shapes(count, (channels, image_size), most_shapes, key, cache_bytes)
        for key, count in enumerate((images, max(1, images // 10), max(1, images // 10)))
    )
    return segmentation(train, val, test, class_names=NAMES)


class Shapes(Generated):
    """Pictures [channels, side, side], float32, about -1 to 1, and classes [side, side], int64."""

    def __init__(
        self, count: int, shape: tuple[int, int], most_shapes: int, key: int, cache_bytes: int
    ) -> None:
        super().__init__(count, (key,), _NOISE, cache_bytes)
        self._shape, self._most_shapes = shape, most_shapes

    def drawn(self, index: int) -> tuple[Tensor, Tensor]:
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
            inside = _INSIDE[number - 1](
                middles[:, None] - down * side, middles - right * side, radius
            )
            inside &= there < 0.75
            image[:, inside] = np.array(colour)[:, None]
            classes[inside] = number
        image += _NOISE * (2 * noise.reshape(image.shape) - 1)
        return torch.from_numpy((2 * image - 1).astype(np.float32)), torch.from_numpy(classes)


# By the pixels from a shape's middle to each pixel's, down [side, 1] and right [side].
_INSIDE: tuple[Callable[[Array, Array, float], NDArray[np.bool_]], ...] = (
    lambda down, right, radius: down**2 + right**2 < radius**2,  # a disc
    lambda down, right, radius: np.maximum(abs(down), abs(right)) < radius,  # a square
    # A triangle with its point up: the lower it is, the wider.
    lambda down, right, radius: (abs(down) < radius) & (2 * abs(right) < down + radius),
)
