"""Moves the learning rate's schedule with the steps that were applied."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpframe.optim.schedules import Schedule
from mpframe.optim.step_result import StepResult
from mpframe.training.by_name import by_name, load_states, states_of
from mpframe.training.callback import Algorithm
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer
from mpframe.user_code import UserCode


class Schedules(Algorithm):
    """Advances a schedule after each applied step, `ReduceLROnPlateau` after each validation.

    Args:
        schedule: one, or one for each of several optimizers by its name.
    """

    def __init__(self, schedule: Schedule | Mapping[str, Schedule]) -> None:
        self.by_name = by_name(schedule)
        plateaus = {n: s for n, s in self.by_name.items() if isinstance(s, ReduceLROnPlateau)}
        self._plateaus = list(plateaus.values())
        self._per_step = {n: s for n, s in self.by_name.items() if n not in plateaus}

    def before_update(self, trainer: Trainer, losses: list[Tensor]) -> None:
        """Learn whether the step before was skipped: this update needs the rate that follows it."""
        if self._per_step:
            trainer.read_verdicts()

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """A schedule moves with its optimizer's step, unless that was skipped."""
        parts = result.each()
        for name, schedule in self._per_step.items():
            if not parts[name].known.skipped:
                with UserCode("scheduler:", schedule):
                    schedule.step()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Show plateaus what the validation gave."""
        for schedule in self._plateaus:
            schedule.step(evaluation.watched)

    def state_dict(self) -> dict[str, Any]:
        """The state of each by its name."""
        return {"schedule": states_of(self.by_name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from it.

        Raises:
            CheckpointError: it is of other schedules.
        """
        load_states(self.by_name, state.get("schedule", {}), "scheduler")
