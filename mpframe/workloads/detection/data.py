"""Generated scenes: coloured shapes on a noisy background, with the box and class of each.

A scene is a pure function of (data_seed, part, index), so none comes from a file. Shapes do not
overlap, and each colour differs from the background's by at least a quarter of the range. The
metric is mean average precision.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import box_iou

from mpframe.data.samples import Generated
from mpframe.data.task import Task, require_counts, require_facts
from mpframe.workloads.detection.model import detection

Boxes = Mapping[str, Tensor]


class MeanAveragePrecision:
    """The area under precision over recall, averaged over the classes, 0 to 1.

    The boxes found in all images are taken by falling score. Each is compared with the true box of
    its class that it overlaps most. It is right if their intersection over union is at least `iou`,
    0 < iou <= 1, and no box before was right about that one. The precision at a recall is the
    largest at this recall or a larger one (PASCAL VOC 2010). Classes without a true box do not
    count.
    """

    name: str
    higher_is_better = True

    def __init__(self, iou: float = 0.5) -> None:
        self.name = f"map_{round(100 * iou)}"
        self._iou = iou
        self._images: list[tuple[Boxes, Boxes]] = []

    def update(self, outputs: Sequence[Boxes], targets: Sequence[Boxes]) -> None:
        """Keep the `boxes`, `scores` and `labels` found in each image, and the true ones."""
        self._images += zip(outputs, targets, strict=True)

    def compute(self) -> Tensor:
        """Return the mean so far, 0-d float64, nan if there was no true box."""
        images = [(_to_host(found), _to_host(true)) for found, true in self._images]
        classes = sorted({label for _, true in images for label in true["labels"].tolist()})
        precisions = [self._measure_class(label, images) for label in classes]
        return torch.tensor(precisions, dtype=torch.float64).mean()

    def _measure_class(self, label: int, images: Sequence[tuple[Boxes, Boxes]]) -> float:
        scores, right, true_boxes = [], [], 0
        for found, true in images:
            mine = found["labels"] == label
            order = found["scores"][mine].argsort(descending=True, stable=True)
            wanted = true["boxes"][true["labels"] == label]
            scores.append(found["scores"][mine][order])
            right.append(self._find_hits(found["boxes"][mine][order], wanted))
            true_boxes += len(wanted)
        order = torch.cat(scores).argsort(descending=True, stable=True)
        return average_precision(torch.cat(right)[order], true_boxes)

    def _find_hits(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Return which boxes of an image, by falling score, are right, [n] bool."""
        overlaps = box_iou(found, wanted)
        hits = torch.zeros(len(found), dtype=torch.bool)
        for number, row in enumerate(overlaps):
            best = int(row.argmax()) if len(row) else 0
            if len(row) and row[best] >= self._iou:
                hits[number] = True
                overlaps[:, best] = -1.0  # It is taken.
        return hits


def average_precision(right: Tensor, true_boxes: int) -> float:
    """Return the area under precision over recall of hits [n], by falling score."""
    hits = right.double().cumsum(0)
    precision = hits / torch.arange(1, len(hits) + 1)
    highest = precision.flip(0).cummax(0).values.flip(0)
    return float((highest * right).sum() / true_boxes)


def _to_host(boxes: Boxes) -> Boxes:
    return {name: tensor.detach().cpu() for name, tensor in boxes.items()}


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
    """Return scenes for a detector, measured by the mean average precision at an IoU of 0.5.

    `image_size` >= 16, `data_seed` >= 0, `noise` is finite and >= 0. See conf/dataset/scenes.yaml.
    """
    require_facts("scenes", channels=(channels, 3), classes=(classes, len(CLASSES)))
    require_counts(train=train, val=val, test=test, max_objects=max_objects)
    require_counts(16, image_size=image_size)
    require_counts(0, data_seed=data_seed)
    parts = [
        Scenes(image_size, max_objects, count, (data_seed, part), noise, cache_bytes)
        for part, count in enumerate((train, val, test))
    ]
    rest: dict[str, Any] = {"test": parts[2], "class_names": CLASSES}
    return Task(parts[0], parts[1], detection, MeanAveragePrecision, listed, **rest)


class Scenes(Generated):
    """Images [3, side, side] float32 and their targets.

    A target has `boxes` [n, 4] float32, (left, top, right, bottom) in pixels, and `labels` [n]
    int64, 1 to 3, with n >= 1.
    """

    things = "scenes"

    def __init__(self, side: int, max_objects: int, *generated: Any) -> None:
        super().__init__(*generated)
        self._side, self._max_objects = side, max_objects

    def drawn(self, index: int) -> tuple[Tensor, Target]:
        tries = _TRIES * self._max_objects
        draws = self.uniforms(4 + 8 * tries, index, 0)
        count, background, rows = draws[0], draws[1:4], draws[4:].reshape(tries, 8)
        boxes = _make_boxes(rows[:, :4]) * self._side
        apart = _choose_apart(boxes, 1 + int(count * self._max_objects))
        boxes, kinds = boxes[apart], (rows[apart, 4] * (len(CLASSES) - 1)).astype(np.int64)
        image = np.empty((3, self._side, self._side))
        image[:] = background[:, None, None]
        for box, kind, colour in zip(boxes, kinds, rows[apart, 5:], strict=True):
            inside = _cover(box, kind, self._side)
            image[:, inside] = (background[:, None] + 0.25 + colour[:, None] / 2) % 1
        target = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(kinds + 1)}
        return self.noisy(image, index), target


def listed(samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """Make a batch, a list of images and a list of their targets."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def _make_boxes(draws: Array) -> Array:
    """Make boxes (left, top, right, bottom) [n, 4] in a unit square of numbers [n, 4]."""
    size = _SMALLEST + draws[:, 0] * (_LARGEST - _SMALLEST)
    ratio = np.sqrt(_LONGEST) ** (2 * draws[:, 1] - 1)
    sides = np.stack([size * ratio, size / ratio], axis=1) / np.sqrt(_LONGEST)
    corner = draws[:, 2:] * (1 - sides)
    return np.concatenate([corner, corner + sides], axis=1)


def _choose_apart(boxes: Array, count: int) -> list[int]:
    """Choose the first `count` boxes that overlap no chosen one."""
    taken: list[int] = []
    for number, (left, top, right, bottom) in enumerate(boxes):
        others = boxes[taken]
        overlaps = (others[:, 0] < right) & (others[:, 2] > left)
        overlaps &= (others[:, 1] < bottom) & (others[:, 3] > top)
        if len(taken) < count and not overlaps.any():
            taken.append(number)
    return taken


def _cover(box: Array, kind: int, side: int) -> Any:
    """Return which pixels a shape covers, [side, side] bool."""
    middle, half = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2
    across, down = ((np.arange(side) + 0.5 - m) / h for m, h in zip(middle, half, strict=True))
    across, down = np.abs(across)[None], down[:, None]
    if CLASSES[kind + 1] == "rectangle":
        return (across <= 1) & (np.abs(down) <= 1)
    if CLASSES[kind + 1] == "ellipse":
        return across**2 + down**2 <= 1
    return (2 * across <= 1 + down) & (down <= 1)  # its top is in the middle
