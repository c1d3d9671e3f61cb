"""A constant rate, and schedules that rise and fall once."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from mpframe.ranges import FRACTION, require


def constant(optimizer: Optimizer) -> LRScheduler:
    """The optimizer's own learning rate throughout."""
    return ConstantLR(optimizer, factor=1.0)


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, warmup: float = 0.1, min_factor: float = 0.0
) -> LRScheduler:
    """Linear warm-up to the learning rate, then half a cosine down.

    Args:
        optimizer: whose groups are scheduled.
        total_steps: planned optimizer steps, >= 1.
        warmup: share of the steps in which the rate rises, 0 to 1.
        min_factor: the last learning rate of each group as a fraction of its own, 0 to 1.

    Raises:
        ConfigError: a share or fraction is out of its range.
    """
    require("scheduler", FRACTION, "a fraction", warmup=warmup, min_factor=min_factor)
    rising = int(total_steps * warmup)
    falling = max(1, total_steps - rising)
    if rising < 1:
        return _cosine(optimizer, falling, min_factor)
    rise = LinearLR(optimizer, start_factor=1.0 / (rising + 1), total_iters=rising)
    fall = _cosine(optimizer, falling, min_factor)
    return SequentialLR(optimizer, [rise, fall], milestones=[rising])


def _cosine(optimizer: Optimizer, steps: int, min_factor: float) -> LRScheduler:
    """Half a cosine from each group's learning rate down to a fraction of it."""
    if not min_factor:
        return CosineAnnealingLR(optimizer, T_max=steps)

    def factor(step: int) -> float:
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * step / steps)) / 2

    return LambdaLR(optimizer, factor)  # torch's own falls to one rate for all groups.


def onecycle(optimizer: Optimizer, total_steps: int, **options: Any) -> LRScheduler:
    """torch's 1cycle policy with the optimizer's learning rate as its peak.

    The momentum, or the first of `betas`, goes the other way: it falls while the rate rises.

    Args:
        optimizer: whose groups are scheduled.
        total_steps: planned optimizer steps, >= 1.
        options: further arguments of torch's `OneCycleLR`, such as `pct_start` or
            `cycle_momentum=False`.
    """
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    # One step more than planned: the schedule is advanced after the last step too.
    return OneCycleLR(optimizer, max_lr=peaks, total_steps=total_steps + 1, **options)
