"""Pictures with boxes: generated scenes, a small single-shot detector, and mean average precision.

A scene is coloured shapes on a noisy background, with the box and class of each. It is a pure
function of (data_seed, part, index), so none comes from a file. Shapes do not overlap, and each
colour differs from the background's by at least a quarter of the range.

The detector is in the manner of SSD (Liu et al. 2016). On each of three maps of features, every
place has two default boxes, with a class and four offsets that move it onto an object. In training
a default box belongs to the object that it overlaps most, if it does so by half or more, and each
object has at least the default box that overlaps it most. All others are background. Only the worst
background boxes count, three for each box with an object.

`detection` is the objective of any detector that returns a dict of losses in training, like
torchvision's.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import batched_nms, box_convert, box_iou, clip_boxes_to_image

from mpframe.core.casts import outside_casts
from mpframe.core.objective import StepOutput
from mpframe.core.tree import map_tensors, to_fp32
from mpframe.core.user_code import user_code
from mpframe.data.samples import Generated
from mpframe.data.task import Task, require_counts, require_facts
from mpframe.precision.trace import preserve_state
from mpframe.workloads.images import require_sizes

Boxes = dict[str, Tensor]


class MeanAveragePrecision:
    """The area under precision over recall, averaged over the classes, 0 to 1.

    By falling score, each box takes the true box of its class that it overlaps most among those not
    taken before, and is right if their intersection over union is at least `iou`, 0 < iou <= 1. The
    precision at a recall is the largest at this recall or a larger one (PASCAL VOC 2010). Classes
    without a true box do not count.
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
        images = map_tensors(lambda tensor: tensor.detach().cpu(), self._images)
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
        hits = torch.cat(right)[order].double()
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        highest = precision.flip(0).cummax(0).values.flip(0)
        return float((highest * hits).sum() / true_boxes)

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


CLASSES = ["background", "rectangle", "ellipse", "triangle"]
_TRIES = 4  # places that are tried for each shape
_SMALLEST, _LARGEST = 0.2, 0.5  # of a shape, as a share of the side
_LONGEST = 1.5  # its longer side over its shorter one

Array = NDArray[np.float64]


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
    rest = MeanAveragePrecision, collate, None, parts[2], CLASSES
    return Task(parts[0], parts[1], detection, *rest)


class Scenes(Generated):
    """Images [3, side, side] float32 and their targets.

    A target has `boxes` [n, 4] float32, (left, top, right, bottom) in pixels, and `labels` [n]
    int64, 1 to 3, with n >= 1.
    """

    def __init__(self, side: int, max_objects: int, *generated: Any) -> None:
        super().__init__(*generated)
        self._side, self._max_objects = side, max_objects

    def draw(self, index: int) -> tuple[Tensor, Boxes]:
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
        return self.add_noise(image, index), target


def collate(samples: list[tuple[Tensor, Boxes]]) -> tuple[list[Tensor], list[Boxes]]:
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


_STRIDES = (8, 16, 32)  # pixels between two places of a map
_SIZES = (0.2, 0.35, 0.55, 0.8)  # of default boxes: map i has size i, and its mean with the next
_OFFSET_UNITS = (0.1, 0.1, 0.2, 0.2)  # so that the offsets are numbers of about 1
_NEGATIVES = 3  # background boxes that count, for each box with an object
_MATCH = 0.5
_SCORE, _NMS, _MOST = 0.05, 0.45, 50  # of the boxes that are reported: least score, IoU, number


class SSD(nn.Module):
    """A detector that is called as torchvision's are, see conf/model/ssd.yaml."""

    defaults: Tensor

    def __init__(self, classes: int, image_size: int, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        require_sizes(classes=classes, image_size=image_size, channels=channels, width=width)
        deep = 4 * width
        widths = pairwise((channels, width, 2 * width, deep))
        self.stem = nn.Sequential(*(layer for pair in widths for layer in _stage(*pair)))
        self.deeper = nn.ModuleList(nn.Sequential(*_stage(deep, deep)) for _ in _STRIDES[1:])
        numbers = 2 * (classes + 4)  # at each place of a map
        self.heads = nn.ModuleList(nn.Conv2d(deep, numbers, 3, padding=1) for _ in _STRIDES)
        self.classes, self.image_size = classes, image_size
        self.register_buffer("defaults", default_boxes(image_size), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Sequence[Tensor], targets: Sequence[Boxes] | None = None) -> Any:
        """Return the losses `classification` and `bbox_regression` in training, 0-d.

        Otherwise return for each image `boxes` [n, 4], (left, top, right, bottom) in pixels,
        `scores` [n], falling, and `labels` [n], >= 1. In training `targets` has such boxes and
        labels. Images are [channels, image_size, image_size].
        """
        logits, offsets = self.predict(torch.stack(list(images)))
        if not self.training:
            return [self._find(*one) for one in zip(logits, offsets, strict=True)]
        if targets is None:
            raise ValueError("a detector in training needs targets")
        matches = [match(self.defaults, one["boxes"], one["labels"]) for one in targets]
        labels, wanted = (torch.stack(part) for part in zip(*matches, strict=True))
        return losses(logits, offsets, labels, wanted)

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, boxes, classes] and offsets [N, boxes, 4] of the default boxes."""
        maps = [self.stem(images)]
        for stage in self.deeper:
            maps.append(stage(maps[-1]))
        found = [
            head(features).permute(0, 2, 3, 1).reshape(len(images), -1, self.classes + 4)
            for head, features in zip(self.heads, maps, strict=True)
        ]
        both = torch.cat(found, dim=1)
        return both[..., : self.classes], both[..., self.classes :]

    def _find(self, logits: Tensor, offsets: Tensor) -> Boxes:
        scores, labels = logits.softmax(dim=1)[:, 1:].max(dim=1)
        sure = scores > _SCORE
        boxes = decode(offsets[sure], self.defaults[sure])
        boxes = clip_boxes_to_image(boxes, (self.image_size, self.image_size))
        scores, labels = scores[sure], labels[sure] + 1
        kept = batched_nms(boxes, scores.float(), labels, _NMS)[:_MOST]
        return {"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]}


def default_boxes(image_size: int) -> Tensor:
    """Return the boxes [n, 4] of all places, as (middle x, middle y, width, height)."""
    boxes = []
    for stride, small, large in zip(_STRIDES, _SIZES, _SIZES[1:], strict=False):
        count = -(-image_size // stride)
        middles = (torch.arange(count) + 0.5) * image_size / count
        y, x = torch.meshgrid(middles, middles, indexing="ij")
        sides = image_size * torch.tensor([small, (small * large) ** 0.5])
        places = torch.stack([x, y], dim=2).reshape(-1, 1, 2).expand(-1, 2, -1)
        boxes.append(torch.cat([places, sides[:, None].expand(len(places), 2, 2)], dim=2))
    return torch.cat([of_map.reshape(-1, 4) for of_map in boxes])


def match(defaults: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels [n], 0 for background, and offsets [n, 4] that default boxes learn."""
    if not len(boxes):
        return labels.new_zeros(len(defaults)), torch.zeros_like(defaults)
    overlaps = box_iou(boxes, box_convert(defaults, "cxcywh", "xyxy"))
    overlap, owner = overlaps.max(dim=0)
    best = overlaps.argmax(dim=1)
    overlap[best], owner[best] = 1.0, torch.arange(len(boxes), device=boxes.device)
    return labels[owner].masked_fill(overlap < _MATCH, 0), encode(boxes[owner], defaults)


def encode(boxes: Tensor, defaults: Tensor) -> Tensor:
    """Return the offsets [n, 4] from default boxes to boxes."""
    wanted = box_convert(boxes, "xyxy", "cxcywh")
    middles = (wanted[:, :2] - defaults[:, :2]) / defaults[:, 2:]
    sides = (wanted[:, 2:] / defaults[:, 2:]).log()
    return torch.cat([middles, sides], dim=1) / defaults.new_tensor(_OFFSET_UNITS)


def decode(offsets: Tensor, defaults: Tensor) -> Tensor:
    """Return the boxes [n, 4] to which offsets move default boxes, the inverse of `encode`."""
    moved = offsets.float() * defaults.new_tensor(_OFFSET_UNITS)
    middles = defaults[:, :2] + moved[:, :2] * defaults[:, 2:]
    sides = moved[:, 2:].exp() * defaults[:, 2:]
    boxes: Tensor = box_convert(torch.cat([middles, sides], dim=1), "cxcywh", "xyxy")
    return boxes


def losses(logits: Tensor, offsets: Tensor, labels: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Return cross-entropy and smooth L1, each summed over the number of boxes with an object."""
    objects = labels > 0
    count = objects.sum().clamp(min=1)
    entropy = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    counted = objects | hardest(entropy.detach().masked_fill(objects, -1.0), objects.sum(dim=1))
    distance = F.smooth_l1_loss(offsets, wanted, reduction="none").sum(dim=2)
    classes, boxes = (entropy * counted).sum() / count, (distance * objects).sum() / count
    return {"classification": classes, "bbox_regression": boxes}


def hardest(entropy: Tensor, objects: Tensor) -> Tensor:
    """Return the background boxes that count, [N, n] bool: the largest losses of each image."""
    rank = entropy.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    chosen: Tensor = (rank < _NEGATIVES * objects[:, None]) & (entropy >= 0)
    return chosen


def _stage(channels: int, width: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
    ]


def detection(model: nn.Module, batch: Any) -> StepOutput:
    """Return the sum of the losses of `model(images, targets)`, and the boxes found for metrics.

    In an evaluation such a model returns boxes and no losses. So it is called twice: for its boxes,
    and as in training for its losses, but with evaluated norm and dropout layers and with fixed
    random numbers.

    Args:
        model: in training model(images, targets) is a dict of losses, means over the images. In an
            evaluation model(images) is a list with `boxes`, `scores` and `labels` of each image.
        batch: a list of images [C, H, W], and a list of dicts with `boxes` and `labels`.

    UserCodeError: the model raised.
    """
    images, targets = batch
    if model.training:
        return StepOutput(_sum_losses(model, images, targets), count=len(images))
    with user_code("model:", model, images=images):
        found = to_fp32(model(images))
    fixed = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    modes = [(m, m.training) for m in model.modules() if not isinstance(m, fixed)]
    with preserve_state(model):
        for module, _ in modes:
            module.training = True
        torch.manual_seed(0)
        loss = _sum_losses(model, images, targets)
    for module, mode in modes:
        module.training = mode
    return StepOutput(loss, found, targets, count=len(images))


def _sum_losses(model: nn.Module, images: Any, targets: Any) -> Tensor:
    with user_code("model:", model, images=images, targets=targets):
        losses = model(images, targets)
    with outside_casts():
        return torch.stack([to_fp32(loss) for loss in losses.values()]).sum()
