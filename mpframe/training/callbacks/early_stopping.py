"""Ends a run whose validation no longer improves."""

import math
from typing import Any

from mpframe.errors import ConfigError, nearest
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class EarlyStopping(Callback):
    """Ends a run after so many validations in a row without a better value.

    Whether more or less is better, the metric says (`higher_is_better`).

    Args:
        patience: validations in a row without a better value, >= 1.
        min_delta: a value is better if it is so by more than this, >= 0.
        monitor: the metric's name, or `loss`; None: the metric of `trainer.monitor`.

    Raises:
        ConfigError: `patience` or `min_delta` is out of its range.
    """

    def __init__(
        self, patience: int = 10, min_delta: float = 0.0, monitor: str | None = None
    ) -> None:
        if patience < 1:
            raise ConfigError(f"callbacks.early_stopping.patience={patience}: must be >= 1")
        if not 0.0 <= min_delta < math.inf:
            raise ConfigError(
                f"callbacks.early_stopping.min_delta={min_delta}: must be a finite number >= 0"
            )
        self._patience, self._min_delta, self._monitor = patience, min_delta, monitor
        self._best: float | None = None
        self._name, self._waited = "", 0

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """End a run at once that goes on from where it was stopped, unless the patience grew."""
        self._stop_if_due(trainer)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Count the validation.

        Raises:
            ConfigError: there is no such metric, or it does not say which value is better.
        """
        self._name = evaluation.monitor if self._monitor is None else self._monitor
        value, higher = self._watched(evaluation, self._name)
        if not math.isnan(value) and self._is_better(value, higher):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the validations since."""
        return {"best": self._best, "waited": self._waited, "name": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved ones."""
        best = state["best"]
        self._best, self._waited = None if best is None else float(best), int(state["waited"])
        self._name = str(state["name"])

    def _is_better(self, value: float, higher: bool) -> bool:
        if self._best is None:
            return True
        gain = value - self._best if higher else self._best - value
        return gain > self._min_delta

    def _watched(self, evaluation: Evaluation, name: str) -> tuple[float, bool]:
        known = {**evaluation.metrics, "loss": evaluation.loss}
        if name not in known:
            raise ConfigError(
                f"callbacks.early_stopping.monitor={name}: no such metric; "
                + (nearest(name, known) or "known: " + ", ".join(known))
            )
        higher = evaluation.direction(name)
        if higher is None:
            raise ConfigError(
                f"callbacks.early_stopping.monitor={name}: the metric does not say which value is "
                "better; give it higher_is_better = True or False, or monitor loss"
            )
        return known[name], higher

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._waited >= self._patience:
            best = math.nan if self._best is None else self._best
            trainer.stop(
                f"early stopping: val_{self._name} was not better than {best:g} in the last "
                f"{self._waited} validations"
            )
