"""Keeps an average of the weights, and validates with it."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from mpframe.optim.ema import Ema
from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Algorithm
from mpframe.training.trainer import Trainer


class AverageWeights(Algorithm):
    """Moves an average after each applied step.

    Args:
        ema: the average.
        model: whose weights are averaged.
    """

    def __init__(self, ema: Ema, model: nn.Module) -> None:
        self.ema = ema
        self._model = model

    def after_update(self, trainer: Trainer, result: StepResult) -> None:
        """Move at once, before the weights do so again; where only the device knows, it chooses."""
        if result.verdict is None:
            self.ema.update(result.skipped)
        elif not result.verdict.skipped:
            self.ema.update()

    def evaluating(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Within the block the weights are the averages."""
        return self.ema.applied()

    def on_load_weights(self, trainer: Trainer) -> None:
        """Start again from the loaded weights."""
        self.ema.restart()

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, and how many updates they have seen."""
        return {"ema": self.ema.by_name(self._model), "ema_updates": self.ema.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from them, if the checkpoint has any.

        Raises:
            CheckpointError: they belong to other weights.
        """
        if state.get("ema") is not None:
            # An older checkpoint has no such count, and its decay was never warmed up.
            updates = state.get("ema_updates", state["progress"]["steps"])
            self.ema.load_by_name(self._model, state["ema"], updates)


def ema_of(trainer: Trainer) -> Ema | None:
    """The average that a trainer keeps; None if it keeps none."""
    kept = (a.ema for a in trainer.algorithms.values() if isinstance(a, AverageWeights))
    return next(kept, None)
