"""Learning-rate schedules from torch, sized to the planned number of steps.

Each is stepped once after every optimizer step that was not skipped. torch's `ReduceLROnPlateau` is
stepped once after every validation, with the metric if that has a direction, else with the loss.
`CountedSchedule` tells those of timm how many updates and epochs there were.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol

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

from mpframe.errors import ConfigError


class Schedule(Protocol):
    """Sets the learning rates of an optimizer's groups, as torch's schedules do."""

    def step(self) -> None:
        """One optimizer step was applied."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that its future depends on, as tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""


class CountedSchedule:
    """Steps a schedule of timm's interface: `step_update(updates)` and `step(epochs)`.

    An epoch is as many applied steps as the data has; skipped steps move no schedule.

    Args:
        schedule: has both methods, `state_dict` and `load_state_dict`.
        steps_per_epoch: >= 1.
    """

    def __init__(self, schedule: Any, steps_per_epoch: int) -> None:
        self.schedule = schedule
        self._steps_per_epoch = steps_per_epoch
        self._updates = 0
        self.__name__ = type(schedule).__name__  # Errors in it name this.

    def step(self) -> None:
        """One optimizer step was applied."""
        self._updates += 1
        self.schedule.step_update(self._updates)
        if self._updates % self._steps_per_epoch == 0:
            self.schedule.step(self._updates // self._steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state and the number of updates."""
        return {"updates": self._updates, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self._updates = int(state_dict["updates"])


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
    for option, value in (("warmup", warmup), ("min_factor", min_factor)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"scheduler.{option}={value}: must be a fraction >= 0 and <= 1")
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


def refuse_overrun(schedules: Iterable[Schedule], steps: int) -> None:
    """Refuse a schedule that is shorter than the planned run, because it would raise at its end.

    A resumed schedule has the length that it was made with.

    Args:
        schedules: made or resumed.
        steps: planned optimizer steps.

    Raises:
        ConfigError: a 1cycle schedule is shorter.
    """
    for schedule in schedules:
        if isinstance(schedule, OneCycleLR) and schedule.total_steps < steps:
            raise ConfigError(
                f"scheduler.total_steps={schedule.total_steps}: OneCycleLR cannot go on after it, "
                f"and the run is planned for {steps} steps; set trainer.epochs or "
                "trainer.max_steps to fit it, or start a new run with init_from"
            )


def onecycle(optimizer: Optimizer, total_steps: int, pct_start: float = 0.3) -> LRScheduler:
    """torch's 1cycle policy with the optimizer's learning rate as its peak.

    Args:
        optimizer: whose groups are scheduled.
        total_steps: planned optimizer steps, >= 1.
        pct_start: share of the steps in which the rate rises, 0 to 1.
    """
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    # One step more than planned: the schedule is advanced after the last step too.
    return OneCycleLR(optimizer, max_lr=peaks, total_steps=total_steps + 1, pct_start=pct_start)
