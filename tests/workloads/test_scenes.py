"""Generated scenes of boxes, and the mean average precision against areas computed by hand."""

import math
from typing import Any

import pytest
import torch
from torchvision.ops import box_iou

from mpframe.data import Loader
from mpframe.workloads.detection import MeanAveragePrecision, average_precision, scenes

SMALL: dict[str, Any] = {"train": 20, "val": 5, "test": 6, "image_size": 48}


def test_a_shape_fills_its_box_and_nothing_else() -> None:
    """Without noise the background has one colour, and each shape's pixels are in its box."""
    train = scenes(**SMALL, noise=0.0).train
    areas: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for image, target in map(train.__getitem__, range(20)):
        colours, counts = image.flatten(1).unique(dim=1, return_counts=True)
        background = colours[:, counts.argmax()][:, None, None]
        shape = (image != background).any(dim=0)
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            middle = (box[:2] + box[2:]).div(2).int().tolist()[::-1]
            apart = (image[:, *middle] - background.flatten()).abs()
            assert torch.minimum(apart, 1 - apart).min() >= 0.25 - 1e-6
            # A pixel belongs to a shape if its middle does.
            left, top = (box[:2] - 0.5).ceil().int().tolist()
            right, bottom = (box[2:] - 0.5).floor().int().tolist()
            inside = shape[top : bottom + 1, left : right + 1]
            areas[int(label)].append(inside.double().mean().item())
            assert inside.any(dim=1)[1:].all()  # In the first row a triangle has its tip alone.
            shape[top : bottom + 1, left : right + 1] = False
        assert not shape.any()
    means = {label: sum(own) / len(own) for label, own in areas.items()}
    assert means[1] == 1.0
    # An ellipse covers pi / 4 of its box, a triangle half; the edges' pixels are at most 4 of 9.6.
    assert 0.7 < means[2] < 0.87
    assert 0.4 < means[3] < 0.6


def test_boxes_lie_in_the_image_and_do_not_overlap() -> None:
    task = scenes(**SMALL, max_objects=9)
    images, targets = next(Loader(task.train, 20, shuffle=False, collate=task.collate).epoch(0))
    assert [tuple(image.shape) for image in images] == [(3, 48, 48)] * 20
    for target in targets:
        boxes, labels = target["boxes"], target["labels"]
        assert 0 <= boxes.min() <= boxes.max() <= 48
        assert torch.equal(box_iou(boxes, boxes), torch.eye(len(boxes)))
        assert 1 <= labels.min() <= labels.max() <= 3
    counts = {len(target["boxes"]) for target in targets}
    assert min(counts) >= 1
    assert len(counts) > 2


LEFT, RIGHT, FAR = [0.0, 0.0, 8.0, 8.0], [8.0, 0.0, 16.0, 8.0], [0.0, 16.0, 8.0, 24.0]


def boxes(*rows: tuple[list[float], int, float], dtype: torch.dtype = torch.float32) -> Any:
    """Of (box, label, score)."""
    return {
        "boxes": torch.tensor([row[0] for row in rows], dtype=dtype).reshape(-1, 4),
        "labels": torch.tensor([row[1] for row in rows], dtype=torch.int64),
        "scores": torch.tensor([row[2] for row in rows], dtype=dtype),
    }


def value(found: Any, true: Any) -> float:
    metric = MeanAveragePrecision()
    metric.update([found], [true])
    return metric.compute().item()


@pytest.mark.parametrize(
    ("right", "true_boxes", "area"),
    [
        ([0, 1], 1, 0.5),
        ([1, 0, 1], 2, (1 + 2 / 3) / 2),
        ([0, 1, 1], 2, 2 / 3),  # At the first recall the precision is that of the second: 2/3.
        ([1], 4, 0.25),
        ([], 3, 0.0),
    ],
)
def test_the_area(right: list[int], true_boxes: int, area: float) -> None:
    found = average_precision(torch.tensor(right, dtype=torch.bool), true_boxes)
    assert found == pytest.approx(area, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_two_classes_in_two_images(dtype: torch.dtype) -> None:
    """Class 1, by score: right, wrong, right, of 3: (1 + 2/3) / 3. Class 2: its one box: 1."""
    first = boxes((LEFT, 1, 0.875), (FAR, 1, 0.75), (RIGHT, 2, 0.5), dtype=dtype)
    second = boxes((LEFT, 1, 0.625), dtype=dtype)
    true = boxes((LEFT, 1, 1), (RIGHT, 2, 1)), boxes((LEFT, 1, 1), (FAR, 1, 1))
    metric = MeanAveragePrecision()
    metric.update([first, second], [*true])
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(((1 + 2 / 3) / 3 + 1) / 2, rel=1e-15)


def test_a_true_box_is_found_once() -> None:
    found = boxes((LEFT, 1, 0.9), (LEFT, 1, 0.8), (RIGHT, 1, 0.7))
    assert value(found, boxes((LEFT, 1, 1), (RIGHT, 1, 1))) == pytest.approx((1 + 2 / 3) / 2)


def test_the_overlap_decides() -> None:
    """Of two boxes of 8 x 8 shifted by s the IoU is (8 - s) / (8 + s): 6/10, 5/11 and 7/9."""
    for shift, hit in ((2.0, 1.0), (3.0, 0.0)):
        assert value(boxes(([shift, 0.0, 8.0 + shift, 8.0], 1, 0.9)), boxes((LEFT, 1, 1))) == hit
    strict = MeanAveragePrecision(iou=0.75)
    strict.update([boxes(([1.0, 0.0, 9.0, 8.0], 1, 0.9))], [boxes((LEFT, 1, 1))])
    assert (strict.name, strict.compute().item()) == ("map_75", 1.0)


def test_scores_and_classes_without_true_boxes() -> None:
    true, nothing = boxes((LEFT, 1, 1)), boxes()
    assert value(boxes((FAR, 1, 0.1), (LEFT, 1, 0.9)), true) == 1.0
    assert value(boxes((FAR, 1, 0.9), (LEFT, 1, 0.1)), true) == 0.5
    assert value(boxes((LEFT, 1, 0.9), (FAR, 2, 0.9)), true) == 1.0
    assert value(nothing, true) == 0.0
    assert math.isnan(value(boxes((LEFT, 1, 0.9)), nothing))
    assert math.isnan(MeanAveragePrecision().compute().item())
