"""The task of a class for each pixel, on any images and masks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from mpframe.data.metrics.dice import Dice
from mpframe.data.metrics.iou import IoU
from mpframe.data.task import Task
from mpframe.objectives.dice_cross_entropy import dice_cross_entropy


def segmentation(
    train: Dataset[Any],
    val: Dataset[Any],
    test: Dataset[Any] | None = None,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Task:
    """Dice loss and cross-entropy on logits [N, classes, H, W]; Dice and IoU, without class 0."""
    return Task(
        train,
        val,
        dice_cross_entropy(),
        {"dice": Dice, "iou": IoU},
        test=test,
        class_names=class_names,
        preprocessing=preprocessing,
    )
