"""The data: points on the arms of a spiral, whose class is the arm."""

import math

import torch
from torch.utils.data import TensorDataset

from mpframe.data import Task, classification


def spirals(arms: int, train: int, val: int, test: int, noise: float) -> Task:
    """So many points to train on, to validate on while training, and to test once at the end.

    `noise` is the standard deviation of what is added to each coordinate.
    """
    return classification(
        _points(arms, train, noise, seed=0),
        _points(arms, val, noise, seed=1),
        _points(arms, test, noise, seed=2),
        class_names=[f"arm {number}" for number in range(arms)],
    )


def _points(arms: int, count: int, noise: float, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(arms, (count,), generator=random)
    radius = torch.rand(count, generator=random).sqrt()
    angle = math.pi * (radius + 2 * arm / arms)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + noise * torch.randn(count, 2, generator=random), arm)
