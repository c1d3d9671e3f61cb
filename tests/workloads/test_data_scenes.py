"""Generated scenes: what stands in a box, that nothing depends on the run's seed, and batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torchvision.ops import box_iou

from mpframe.core.errors import ConfigError
from mpframe.data import Loader
from mpframe.workloads.detection import scenes

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
    train = scenes(**SMALL, max_objects=9).train
    counts = set()
    for _, target in map(train.__getitem__, range(20)):
        boxes, labels = target["boxes"], target["labels"]
        counts.add(len(boxes))
        assert (boxes >= 0).all()
        assert (boxes <= 48).all()
        assert torch.equal(box_iou(boxes, boxes), torch.eye(len(boxes)))
        assert (labels >= 1).all()
        assert (labels <= 3).all()
    assert min(counts) >= 1
    assert len(counts) > 2


def test_colours_differ_from_the_background() -> None:
    image, target = scenes(**SMALL, noise=0.0).train[3]
    colours = image.flatten(1).unique(dim=1, return_counts=True)
    background = colours[0][:, colours[1].argmax()]
    (left, top, right, bottom), *_ = target["boxes"]
    colour = image[:, int((top + bottom) / 2), int((left + right) / 2)]
    apart = (colour - background).abs()
    assert torch.minimum(apart, 1 - apart).min() >= 0.25 - 1e-6


def test_scenes_are_a_function_of_data_seed_part_and_index() -> None:
    first, again, other = (scenes(**SMALL, data_seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.train[7][0], again.train[7][0])
    assert torch.equal(first.train[7][1]["boxes"], again.train[7][1]["boxes"])
    assert not torch.equal(first.train[7][0], other.train[7][0])
    assert first.test is not None
    parts = [part[3][0] for part in (first.train, first.val, first.test)]
    assert not any(torch.equal(a, b) for a, b in pairwise(parts))
    assert [len(part) for part in (first.train, first.val, first.test)] == [20, 5, 6]  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="20: there are 20 scenes"):
        first.train[20]


def test_the_loader_gives_two_lists() -> None:
    task = scenes(**SMALL)
    images, targets = next(iter(Loader(task.train, 8, shuffle=True, collate=task.collate).epoch(0)))
    assert [tuple(image.shape) for image in images] == [(3, 48, 48)] * 8
    assert all(set(target) == {"boxes", "labels"} for target in targets)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"val": 0}, r"dataset\.val=0: must be a whole number >= 1"),
        ({"channels": 1}, r"dataset\.channels=1: scenes has 3; set dataset\.channels=3"),
        ({"classes": 3}, r"dataset\.classes=3: scenes has 4; set dataset\.classes=4"),
        ({"image_size": 8}, r"dataset\.image_size=8: must be a whole number >= 16"),
        ({"max_objects": 0}, r"dataset\.max_objects=0: must be a whole number >= 1"),
        ({"noise": float("inf")}, r"dataset\.noise=inf: must be a number >= 0"),
    ],
)
def test_options_out_of_range(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        scenes(**given)
