"""Ends a run that a signal asked to stop: on all ranks at the same step."""

from mpframe.training.callback import Callback
from mpframe.training.interruption import Interruption
from mpframe.training.trainer import Trainer


class StopOnSignal(Callback):
    """Ends a run that was asked to stop: between two steps, or between two validated batches.

    Args:
        interruption: knows whether a signal came. This callback is the last one, so that all
            others have dealt with the step.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def on_prediction_step(self, trainer: Trainer) -> None:
        """Abandon the validation if a signal came; a resumed run validates again."""
        self._raise_if_received(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Raise RunInterrupted if a signal came, to this rank or to another."""
        self._raise_if_received(trainer)

    def _raise_if_received(self, trainer: Trainer) -> None:
        if trainer.world.size > 1:
            self._interruption.take(trainer.world.max_of([self._interruption.received or 0])[0])
        self._interruption.raise_if_received()
