"""Pictures of different sizes with boxes on them: batches are lists, as for detection models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mpframe.core.objective import StepOutput
from mpframe.data import RMSE, Task


class Pictures(Dataset[Any]):
    """Sixteen pictures of random values, each with one box or two; `bad` has a box at inf."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        boxes = torch.full((1 + index % 2, 4), torch.inf if index == self.bad else index / 16)
        return torch.rand(3, 8 + index % 5, 9), {"boxes": boxes, "file": f"{index}.png"}


def listed(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def mean_box(model: nn.Module, batch: Any) -> StepOutput:
    """The squared distance of each picture's one predicted box from the mean of its boxes."""
    images, targets = batch
    found = torch.stack([model(image[None])[0] for image in images]).float()
    wanted = torch.stack([target["boxes"].mean(dim=0) for target in targets])
    loss = nn.functional.mse_loss(found, wanted)
    return StepOutput(loss, found, wanted, count=len(images))


def task(bad: int | None = None) -> Task:
    return Task(Pictures(bad), Pictures(), mean_box, RMSE, collate=listed)


def detector() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
