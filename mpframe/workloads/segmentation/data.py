"""Images with a class for each pixel: photographs with masks, or generated pictures.

`mask_folder` reads any two folders of photographs and masks of the same names, which are untrusted.
`shapes` draws discs, squares and triangles, and needs no files. A sample is an image
[channels, H, W], float32, and its classes [H, W], int64.
"""

from collections.abc import Callable, Sequence
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
from mpframe.data.samples import BatchDataset, Generated, draw_uniforms
from mpframe.data.task import Task, require_choice, require_counts, require_facts
from mpframe.workloads.segmentation.model import dice_cross_entropy

_MASK_FORMATS = ("PNG", "BMP")  # A JPEG does not keep numbers.
_ONE_NUMBER = ("1", "L", "P")  # black and white, grey, palette: Pillow's modes of 8 bits or fewer

Window = tuple[int, int, int, bool]  # number of a photograph, first row and column, mirrored


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
    if odd := sorted(images.keys() ^ masks.keys()):
        raise DataError(
            f"{folder}: {odd[0]} is in images/ or in masks/ only; a photograph and its mask have "
            "the same name"
        )
    return [Pair(images[name], masks[name]) for name in sorted(images)]


def _list_by_name(folder: Path) -> dict[str, str]:
    paths = list_unlabelled(folder)
    named = {str(Path(path).relative_to(folder).with_suffix("")): path for path in paths}
    if twice := sorted({*paths} - {*named.values()}):
        raise DataError(f"{twice[0]}: another file has the same name; remove one of them")
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
    read = {
        name: Photographs(pairs, channels, classes, image_size)
        for name, pairs in _list_parts(Path(root)).items()
    }
    pixels = sum(height * width for part in read.values() for height, width in part.sizes)
    if pixels * (channels + 1) <= cache_bytes:
        for part in read.values():
            part.keep()
    train = read["train"]
    normalize = Normalize.given(mean, std, channels) or _measure(train)
    covered = {name: tiles(part, normalize) for name, part in read.items()}
    crops = RandomCrops(train, normalize, crops_per_image, flip)
    how = normalize.described(image_size)
    return segmentation(crops, covered["val"], test=covered.get("test"), preprocessing=how)


def _list_parts(root: Path) -> dict[str, list[Pair]]:
    folders = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    if folders[:2] != ["train", "val"]:
        raise DataError(
            f"dataset.root={root}: needs the folders train/ and val/, with images/ and masks/ in "
            "each; set dataset.root to such a tree"
        )
    return {name: list_pairs(root / name) for name in folders}


class Photographs:
    """Photographs and masks, of which squares of `side` pixels are cut."""

    def __init__(self, pairs: list[Pair], channels: int, classes: int, side: int) -> None:
        self._pairs, self._shape, self.side = pairs, (channels, classes), side
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self.sizes = [pair.size() for pair in pairs]  # height and width
        for pair, (height, width) in zip(pairs, self.sizes, strict=True):
            if min(height, width) < side:
                raise ConfigError(
                    f"dataset.image_size={side}: {pair.image} is {width} x {height} pixels; use "
                    f"dataset.image_size={min(height, width)} or less"
                )

    def keep(self) -> None:
        """Read them all into memory."""
        self._kept = [pair.read(*self._shape) for pair in self._pairs]

    def cut(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return a square, uint8 [channels, side, side], and its classes, uint8 [side, side]."""
        number, top, left, mirrored = window
        pair = self._kept[number] if self._kept else self._pairs[number].read(*self._shape)
        rows, columns = slice(top, top + self.side), slice(left, left + self.side)
        image, classes = (part[..., rows, columns] for part in pair)
        return (image.flip(-1), classes.flip(-1)) if mirrored else (image, classes)


def _measure(train: Photographs) -> Normalize:
    """Measure the middles of the photographs."""
    middles = [
        (number, (height - train.side) // 2, (width - train.side) // 2, False)
        for number, (height, width) in enumerate(train.sizes)
    ]
    cut = [train.cut(middle)[0] for middle in middles[spread(len(middles))]]
    return Normalize.measured(torch.stack(cut))


class Crops(BatchDataset):
    """Squares of photographs, [channels, side, side] float32, and classes, [side, side] int64."""

    def __init__(
        self, photographs: Photographs, normalize: Normalize, windows: list[Window]
    ) -> None:
        self.photographs, self.normalize, self.windows = photographs, normalize, windows

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ([N, channels, side, side] float32, [N, side, side] int64)."""
        cut = [self.photographs.cut(self.windows[index]) for index in indices]
        images, targets = zip(*cut, strict=True)
        return self.normalize(torch.stack(images)), torch.stack(targets).long()

    def __len__(self) -> int:
        return len(self.windows)


class RandomCrops(Crops):
    """`each` crops of every photograph at places that depend only on (seed, epoch, index)."""

    def __init__(
        self, photographs: Photographs, normalize: Normalize, each: int, flip: bool
    ) -> None:
        super().__init__(photographs, normalize, [])
        self._each, self._flip = each, flip
        self.set_epoch(0, 0)

    def unaugmented(self) -> Crops:
        """Return crops that cover the same photographs, for predictions."""
        return tiles(self.photographs, self.normalize)

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the crops of an epoch."""
        sizes, side = self.photographs.sizes, self.photographs.side
        uniforms = draw_uniforms(3, seed, epoch, range(len(sizes) * self._each))
        self.windows = []
        for index, (down, right, mirror) in enumerate(uniforms.tolist()):
            height, width = sizes[index // self._each]
            top, left = int(down * (height - side + 1)), int(right * (width - side + 1))
            mirrored = self._flip and mirror < 0.5
            self.windows.append((index // self._each, top, left, mirrored))


def tiles(photographs: Photographs, normalize: Normalize) -> Crops:
    """Return the fewest crops that cover each photograph, evenly placed."""
    windows = [
        (number, top, left, False)
        for number, (height, width) in enumerate(photographs.sizes)
        for top in _starts(height, photographs.side)
        for left in _starts(width, photographs.side)
    ]
    return Crops(photographs, normalize, windows)


def _starts(length: int, size: int) -> list[int]:
    """Return where crops of `size` begin so that they cover `length`, from 0 to `length - size`."""
    gaps = max(1, -(-length // size) - 1)
    return sorted({(length - size) * place // gaps for place in range(gaps + 1)})


Array = NDArray[np.floating[Any]]

NAMES = ("background", "disc", "square", "triangle")
_NOISE = 0.15
_DRAWS = 5  # of a shape, besides its colour: whether it is there, kind, place (2), size


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
    require_counts(8, image_size=image_size)
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
