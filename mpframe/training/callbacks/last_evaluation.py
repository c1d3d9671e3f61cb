"""Keeps the last validation."""

from dataclasses import asdict
from typing import Any

from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer


class LastEvaluation(Callback):
    """Keeps the last validation for the summary."""

    def __init__(self) -> None:
        self.value: Evaluation | None = None

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Keep it."""
        self.value = evaluation

    def state_dict(self) -> dict[str, Any]:
        """The validation, if there was one."""
        return {"value": None if self.value is None else asdict(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved one."""
        held = state["value"]
        if held is not None:
            numbers = {name: float(held[name]) for name in ("loss", "value")}
            self.value = Evaluation(**{**held, **numbers})
