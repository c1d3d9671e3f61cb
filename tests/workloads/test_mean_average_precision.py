"""The mean average precision against areas computed by hand, in every dtype of the boxes."""

import math
from typing import Any

import pytest
import torch

from mpframe.workloads.detection import MeanAveragePrecision, average_precision

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LEFT, RIGHT, FAR = [0.0, 0.0, 8.0, 8.0], [8.0, 0.0, 16.0, 8.0], [0.0, 16.0, 8.0, 24.0]


def boxes(*rows: tuple[list[float], int, float], dtype: torch.dtype = torch.float32) -> Any:
    """Of (box, label, score)."""
    return {
        "boxes": torch.tensor([row[0] for row in rows], dtype=dtype).reshape(-1, 4),
        "labels": torch.tensor([row[1] for row in rows], dtype=torch.int64),
        "scores": torch.tensor([row[2] for row in rows], dtype=dtype),
    }


def value(*images: tuple[Any, Any]) -> float:
    metric = MeanAveragePrecision()
    for found, true in images:
        metric.update([found], [true])
    return metric.compute().item()


@pytest.mark.parametrize(
    ("right", "true_boxes", "area"),
    [
        ([1, 1], 2, 1.0),
        ([0, 1], 1, 0.5),
        ([1, 0, 1], 2, (1 + 2 / 3) / 2),
        ([0, 1, 1], 2, 2 / 3),  # At the first recall the precision is that of the second: 2/3.
        ([1], 4, 0.25),
        ([0, 0], 3, 0.0),
        ([], 3, 0.0),
    ],
)
def test_the_area(right: list[int], true_boxes: int, area: float) -> None:
    found = average_precision(torch.tensor(right, dtype=torch.bool), true_boxes)
    assert found == pytest.approx(area, rel=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_classes_in_two_images(dtype: torch.dtype) -> None:
    """Class 1, by score: right, wrong, right, of 3: (1 + 2/3) / 3. Class 2: its one box: 1."""
    first = boxes((LEFT, 1, 0.875), (FAR, 1, 0.75), (RIGHT, 2, 0.5), dtype=dtype)
    second = boxes((LEFT, 1, 0.625), dtype=dtype)
    metric = MeanAveragePrecision()
    metric.update(
        [first, second],
        [
            boxes((LEFT, 1, 1), (RIGHT, 2, 1), dtype=dtype),
            boxes((LEFT, 1, 1), (FAR, 1, 1), dtype=dtype),
        ],
    )
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(((1 + 2 / 3) / 3 + 1) / 2, rel=1e-15)


def test_a_true_box_is_found_once() -> None:
    found = boxes((LEFT, 1, 0.9), (LEFT, 1, 0.8), (RIGHT, 1, 0.7))
    assert value((found, boxes((LEFT, 1, 1), (RIGHT, 1, 1)))) == pytest.approx((1 + 2 / 3) / 2)


def test_the_order_of_the_boxes_does_not_matter_but_their_scores_do() -> None:
    true = boxes((LEFT, 1, 1))
    assert value((boxes((FAR, 1, 0.1), (LEFT, 1, 0.9)), true)) == 1.0
    assert value((boxes((FAR, 1, 0.9), (LEFT, 1, 0.1)), true)) == 0.5


@pytest.mark.parametrize(("shift", "hit"), [(2.0, True), (3.0, False)])
def test_the_overlap_decides(shift: float, hit: bool) -> None:
    """Of two boxes of 8 x 8 shifted by s the IoU is (8 - s) / (8 + s): 6/10 and 5/11."""
    moved = [shift, 0.0, 8.0 + shift, 8.0]
    assert value((boxes((moved, 1, 0.9)), boxes((LEFT, 1, 1)))) == float(hit)


def test_another_overlap_has_another_name() -> None:
    metric = MeanAveragePrecision(iou=0.75)
    metric.update([boxes(([1.0, 0.0, 9.0, 8.0], 1, 0.9))], [boxes((LEFT, 1, 1))])  # IoU 7/9
    assert (metric.name, metric.compute().item()) == ("map_75", 1.0)


def test_a_class_without_true_boxes_does_not_count() -> None:
    assert value((boxes((LEFT, 1, 0.9), (FAR, 2, 0.9)), boxes((LEFT, 1, 1)))) == 1.0


def test_images_without_boxes() -> None:
    nothing = boxes()
    assert value((nothing, boxes((LEFT, 1, 1)))) == 0.0
    assert math.isnan(value((boxes((LEFT, 1, 0.9)), nothing)))
    assert math.isnan(MeanAveragePrecision().compute().item())
