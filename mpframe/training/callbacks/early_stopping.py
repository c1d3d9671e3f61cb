"""Ends a run whose validation no longer improves."""

import math
from typing import Any

from mpframe.errors import ConfigError, nearest
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.evaluation.best import Best
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class EarlyStopping(Callback):
    """Ends a run after a number of validations in a row without a better value.

    The metric says whether more or less is better (`higher_is_better`); nan and inf never are.

    Args:
        patience: validations in a row without a better value, >= 1.
        min_delta: a value counts as better if it is better by more than this, >= 0.
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
        self._best, self._waited = Best(), 0

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """End a resumed run at once if it was stopped here before, unless the patience grew."""
        self._stop_if_due(trainer)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Count the validation, and end the run if it was one too many.

        Raises:
            ConfigError: there is no such metric, or it does not say which value is better.
        """
        name = evaluation.monitor if self._monitor is None else self._monitor
        value, higher = self._watched(evaluation, name)
        step = trainer.progress.global_step
        better = self._best.offer(name, value, step, higher, by=self._min_delta)
        self._waited = 0 if better else self._waited + 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the number of validations since then."""
        return {"best": self._best.state_dict(), "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved ones."""
        self._best, self._waited = Best.saved(state["best"]), int(state["waited"])

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
            trainer.stop(
                f"early stopping: val_{self._best.name} was not better than {self._best} in the "
                f"last {self._waited} validations"
            )
