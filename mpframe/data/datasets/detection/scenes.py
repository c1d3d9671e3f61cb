"""Generated scenes: coloured shapes on a noisy background, with the box and class of each.

A scene is a pure function of (data_seed, part, index), so none comes from a file. Shapes do not
overlap, and each colour differs from the background's by at least a quarter of the range.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.kept import Kept
from mpframe.data.facts import require_facts, require_whole
from mpframe.data.keyed_random import keyed_uniform
from mpframe.data.metrics.mean_average_precision import MeanAveragePrecision
from mpframe.data.task import Task
from mpframe.errors import ConfigError
from mpframe.objectives.detection import detection

CLASSES = ["background", "rectangle", "ellipse", "triangle"]
_TRIES = 4  # places that are tried for each shape
_SMALLEST, _LARGEST = 0.2, 0.5  # of a shape, as a share of the side
_LONGEST = 1.5  # its longer side over its shorter one

Array = NDArray[np.float64]
Target = dict[str, Tensor]


def scenes(
    train: int = 4000,
    val: int = 400,
    test: int = 400,
    channels: int = 3,
    image_size: int = 300,
    classes: int = 4,
    max_objects: int = 4,
    noise: float = 0.1,
    data_seed: int = 0,
    cache_bytes: int = 2**28,
) -> Task:
    """Scenes for a detector, measured by the mean average precision at an IoU of 0.5.

    Args:
        train, val, test: scenes in each part, >= 1.
        channels: 3.
        image_size: pixels a side, >= 16.
        classes: 4: rectangle, ellipse, triangle, and the background, which is class 0.
        max_objects: a scene has 1 to so many, fewer if there is no room. >= 1.
        noise: standard deviation of the noise on values from 0 to 1. >= 0, finite.
        data_seed: another one gives other scenes. >= 0.
        cache_bytes: keep samples in memory up to this size, in each process that loads.

    Raises:
        ConfigError: an argument is out of its range.
    """
    require_facts("scenes", channels=(channels, 3), classes=(classes, len(CLASSES)))
    counts = {"train": train, "val": val, "test": test}
    least = {"image_size": 16, "data_seed": 0}
    sizes = {"image_size": image_size, "max_objects": max_objects, "data_seed": data_seed}
    for name, size in {**counts, **sizes}.items():
        require_whole(f"dataset.{name}", size, least.get(name, 1))
    if not 0 <= noise < math.inf:
        raise ConfigError(f"dataset.noise={noise}: must be >= 0 and finite")
    parts = [
        Kept(Scenes(count, image_size, max_objects, noise, (data_seed, part)), cache_bytes)
        for part, count in enumerate(counts.values())
    ]
    return Task(
        parts[0],
        parts[1],
        detection,
        MeanAveragePrecision,
        listed,
        test=parts[2],
        class_names=CLASSES,
    )


class Scenes(Dataset[tuple[Tensor, Target]]):
    """Pairs of an image [3, side, side] float32 and its target.

    A target has `boxes` [n, 4] float32, (left, top, right, bottom) in pixels, and `labels` [n]
    int64, 1 to 3; n >= 1.

    Args:
        count: how many.
        side, max_objects, noise: as for `scenes`.
        key: whole numbers that decide all scenes.
    """

    def __init__(
        self, count: int, side: int, max_objects: int, noise: float, key: tuple[int, ...]
    ) -> None:
        self._count, self._side, self._max_objects = count, side, max_objects
        self._noise, self._key = noise, key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        if not 0 <= index < self._count:
            raise IndexError(f"{index}: there are {self._count} scenes")
        tries = _TRIES * self._max_objects
        draws = keyed_uniform(4 + 8 * tries, *self._key, index, 0)[0]
        count, background, rows = draws[0], draws[1:4], draws[4:].reshape(tries, 8)
        boxes = _boxes(rows[:, :4]) * self._side
        apart = _apart(boxes, 1 + int(count * self._max_objects))
        boxes, kinds = boxes[apart], (rows[apart, 4] * (len(CLASSES) - 1)).astype(np.int64)
        image = np.empty((3, self._side, self._side))
        image[:] = background[:, None, None]
        for box, kind, colour in zip(boxes, kinds, rows[apart, 5:], strict=True):
            inside = _inside(box, kind, self._side)
            image[:, inside] = (background[:, None] + 0.25 + colour[:, None] / 2) % 1
        even = keyed_uniform(image.size, *self._key, index, 1).reshape(image.shape) - 0.5
        image += self._noise * math.sqrt(12) * even  # even numbers over 1 deviate by 1 / sqrt(12)
        target = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(kinds + 1)}
        return torch.from_numpy(image).float(), target


def listed(samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """A batch: the images as a list and their targets as a list."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def _boxes(draws: Array) -> Array:
    """Boxes (left, top, right, bottom) [n, 4] inside a square of side 1, from numbers [n, 4]."""
    size = _SMALLEST + draws[:, 0] * (_LARGEST - _SMALLEST)
    ratio = np.sqrt(_LONGEST) ** (2 * draws[:, 1] - 1)
    sides = np.stack([size * ratio, size / ratio], axis=1) / np.sqrt(_LONGEST)
    corner = draws[:, 2:] * (1 - sides)
    return np.concatenate([corner, corner + sides], axis=1)


def _apart(boxes: Array, count: int) -> list[int]:
    """The first `count` boxes that overlap none that was taken before."""
    taken: list[int] = []
    for number, (left, top, right, bottom) in enumerate(boxes):
        others = boxes[taken]
        across = (others[:, 0] < right) & (others[:, 2] > left)
        if (
            len(taken) < count
            and not (across & (others[:, 1] < bottom) & (others[:, 3] > top)).any()
        ):
            taken.append(number)
    return taken


def _inside(box: Array, kind: int, side: int) -> Any:
    """Which pixels a shape covers: [side, side] of truth values."""
    middle, half = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2
    across, down = ((np.arange(side) + 0.5 - m) / h for m, h in zip(middle, half, strict=True))
    across, down = np.abs(across)[None], down[:, None]
    if CLASSES[kind + 1] == "rectangle":
        return (across <= 1) & (np.abs(down) <= 1)
    if CLASSES[kind + 1] == "ellipse":
        return across**2 + down**2 <= 1
    return (2 * across <= 1 + down) & (down <= 1)  # its top is in the middle
