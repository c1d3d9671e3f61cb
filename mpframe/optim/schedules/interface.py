"""The interface of a schedule, and what a run does with schedules of others."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch.optim.lr_scheduler import OneCycleLR

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
