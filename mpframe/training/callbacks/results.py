"""Keeps what the summary says of a run: the last loss, the last validation and the test."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer


class Results(Callback):
    """Keeps the last loss, the last validation and the test.

    Attributes:
        loss: unscaled, of the last step; None before the first one.
        evaluation: the last validation; None before the first one.
        test: None unless the run was tested; a checkpoint never holds it.
    """

    def __init__(self) -> None:
        self.loss: float | Tensor | None = None
        self.evaluation: Evaluation | None = None
        self.test: Evaluation | None = None

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Keep the loss; it stays on the device."""
        if result.loss is not None:
            self.loss = result.loss

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Keep the validation."""
        self.evaluation = evaluation

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Keep the test."""
        self.test = evaluation

    def state_dict(self) -> dict[str, Any]:
        """Loss and validation, as numbers."""
        return {
            "loss": None if self.loss is None else float(self.loss),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved ones."""
        self.loss = None if state["loss"] is None else float(state["loss"])
        held = state["evaluation"]
        if held is not None:
            self.evaluation = Evaluation(
                float(held["loss"]),
                {str(name): float(value) for name, value in held["metrics"].items()},
                dict(held["higher_is_better"]),
                str(held["monitor"]),
            )
