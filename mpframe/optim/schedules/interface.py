"""The interface of a schedule, and how one goes on in a run that is planned otherwise."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

log = logging.getLogger(__name__)


class Schedule(Protocol):
    """Sets the learning rates of an optimizer's groups, as torch's schedules do."""

    def step(self) -> None:
        """One optimizer step was applied."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that its future depends on, as tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""


class PlannedSchedule:
    """A schedule that a run resumes, or replays if it is planned otherwise.

    A state saved with the same arguments is loaded. If an argument differs, such as the length, a
    new schedule takes as many steps as were applied: from there on the rates are those of the new
    plan, whatever kind of schedule it is. The optimizer's learning rates stay the saved ones.

    Skipped steps move no schedule. timm's are told the number of applied steps,
    `step_update(updates)`, and after each epoch that of epochs, `step(epochs)`.

    Args:
        make: makes the schedule for the optimizer, from the learning rates of its groups.
        optimizer: whose groups are scheduled.
        arguments: those of the schedule, as text by name.
        steps_per_epoch: >= 1.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        optimizer: Optimizer,
        arguments: Mapping[str, str],
        steps_per_epoch: int,
    ) -> None:
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._make, self._optimizer = make, optimizer
        self._arguments = dict(arguments)
        self._steps_per_epoch = steps_per_epoch
        self._updates = 0
        self.schedule = make()
        self.__name__ = type(self.schedule).__name__  # Errors in it name this.

    def step(self) -> None:
        """One optimizer step was applied."""
        self._updates += 1
        if not hasattr(self.schedule, "step_update"):
            self.schedule.step()
            return
        self.schedule.step_update(self._updates)
        if self._updates % self._steps_per_epoch == 0:
            self.schedule.step(self._updates // self._steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state, the number of updates, and what it was made from."""
        return {
            "updates": self._updates,
            "rates": self._rates,
            "arguments": self._arguments,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there; a warning names the arguments that differ."""
        self._rates = [float(rate) for rate in state_dict["rates"]]
        then, now = dict(state_dict["arguments"]), self._arguments
        self._updates = int(state_dict["updates"])
        if then == now:
            self.schedule.load_state_dict(state_dict["schedule"])
            return
        self._replay(self._updates)
        log.warning(
            "warning: %s: from step %d on the learning rate follows this schedule",
            ", ".join(
                f"scheduler.{name}={now.get(name)} (was {then.get(name)})"
                for name in sorted(then.keys() | now.keys())
                if then.get(name) != now.get(name)
            ),
            self._updates,
        )

    def _replay(self, updates: int) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self.schedule, self._updates = self._make(), 0
        with warnings.catch_warnings():
            # The optimizer took these steps before the run was resumed.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(updates):
                self.step()
