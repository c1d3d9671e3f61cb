"""Generated pictures of discs, squares and triangles, of any size; needs no files.

A picture is a noisy background of one colour with some shapes on it, each of a place, a size and a
colour of its own; a later shape hides an earlier one. The colours say nothing about the class. All
is a function of (part, index): the same pictures in every run, and no two parts share one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.kept import Kept
from mpframe.data.datasets.segmentation.task import segmentation
from mpframe.data.facts import require_facts, require_whole
from mpframe.data.keyed_random import keyed_uniform
from mpframe.data.task import Task

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
    """Pictures with a class for each pixel: background, disc, square, triangle.

    Args:
        image_size: pixels a side, >= 8.
        channels: 3, or any number >= 1.
        classes: 4.
        images: to train on; a tenth as many, and at least one, validate, and as many test.
        most_shapes: in one picture, >= 1; each is there with a probability of three quarters.
        cache_bytes: keep samples in memory up to this size, in each process that loads.

    Raises:
        ConfigError: an option is out of its range.
    """
    require_facts("shapes", classes=(classes, len(NAMES)))
    require_whole("dataset.image_size", image_size, least=_LEAST_SIDE)
    require_whole("dataset.channels", channels, least=1)
    require_whole("dataset.images", images, least=1)
    require_whole("dataset.most_shapes", most_shapes, least=1)
    train, val, test = (
        Kept(Shapes(count, (channels, image_size), most_shapes, key), cache_bytes)
        for key, count in enumerate((images, max(1, images // 10), max(1, images // 10)))
    )
    return segmentation(train, val, test, class_names=NAMES)


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Pictures [channels, side, side], float32 of about -1 to 1, and classes [side, side], int64.

    Args:
        count: how many.
        shape: (channels, side) of a picture.
        most_shapes: in one of them.
        key: other pictures for another key.
    """

    def __init__(self, count: int, shape: tuple[int, int], most_shapes: int, key: int) -> None:
        self._count = count
        self._shape = shape
        self._most_shapes = most_shapes
        self._key = key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, classes = self._draw(range(len(self))[index])
        return torch.from_numpy(image), torch.from_numpy(classes)

    def _draw(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        channels, side = self._shape
        draws = _DRAWS + channels
        (uniforms,) = keyed_uniform(
            channels + self._most_shapes * draws + channels * side**2, self._key, index
        )
        background, uniforms = np.split(uniforms, [channels])
        own, noise = np.split(uniforms, [self._most_shapes * draws])
        image = np.broadcast_to(background[:, None, None], (channels, side, side)).copy()
        classes = np.zeros((side, side), dtype=np.int64)
        for there, kind, down, right, size, *colour in own.reshape(-1, draws):
            number = 1 + int(kind * len(_INSIDE))
            inside = _INSIDE[number - 1](*_distances(side, down, right), (0.1 + 0.15 * size) * side)
            inside &= there < 0.75
            image[:, inside] = np.array(colour)[:, None]
            classes[inside] = number
        image += _NOISE * (2 * noise.reshape(image.shape) - 1)
        return (2 * image - 1).astype(np.float32), classes


def _distances(side: int, down: float, right: float) -> tuple[Array, Array]:
    """Pixels from a point to each pixel's middle, downwards [side, 1] and to the right [side]."""
    middles = np.arange(side) + 0.5
    return middles[:, None] - down * side, middles - right * side


def _disc(down: Array, right: Array, radius: float) -> NDArray[np.bool_]:
    return down**2 + right**2 < radius**2


def _square(down: Array, right: Array, radius: float) -> NDArray[np.bool_]:
    return np.maximum(abs(down), abs(right)) < radius


def _triangle(down: Array, right: Array, radius: float) -> NDArray[np.bool_]:
    """Its point is up: the lower it is, the wider."""
    return (abs(down) < radius) & (2 * abs(right) < down + radius)


_INSIDE: tuple[Callable[[Array, Array, float], NDArray[np.bool_]], ...] = (
    *(_disc, _square, _triangle),
)
