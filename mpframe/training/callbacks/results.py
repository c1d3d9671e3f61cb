"""Keeps a run's results: the last loss, the last and the best validation, the test."""

from collections import deque
from dataclasses import asdict
from typing import Any

from torch import Tensor

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.training.evaluation import Best, Evaluation, much_worse
from mpframe.training.trainer import Trainer

_RECENT = 100  # validations


class Results(Callback):
    """Keeps the last loss, the last validation, the best one and the test."""

    def __init__(self) -> None:
        self.loss: float | Tensor | None = None  # unscaled, of the last step
        self.evaluation: Evaluation | None = None  # the last validation
        self.best = Best()  # without a value if the monitored metric has no direction
        self.test: Evaluation | None = None  # in no checkpoint
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def worsening(self) -> str | None:
        """A line if the last validation is much worse than the best one, else None."""
        best, last = self.best.value, self.evaluation
        if best is None or last is None or not much_worse(best, self._recent):
            return None
        named = f"the last val_{self.best.name}, {last.value:g}"
        return f"{named}, is much worse than the best, {self.best}"

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.loss is not None:
            self.loss = result.loss

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        name, value = evaluation.monitor, evaluation.value
        higher = evaluation.direction(name)
        if higher is None:
            return
        if name != self.best.name:
            self._recent.clear()
        self._recent.append(value)
        self.best.offer(name, value, trainer.progress.global_step, higher)

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.test = evaluation

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": None if self.loss is None else float(self.loss),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "best": self.best.state_dict(),
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = None if state["loss"] is None else float(state["loss"])
        held = state["evaluation"]
        if held is not None:
            self.evaluation = Evaluation(
                float(held["loss"]),
                {str(name): float(value) for name, value in held["metrics"].items()},
                dict(held["higher_is_better"]),
                str(held["monitor"]),
            )
        self.best = Best.from_state(state["best"])
        self._recent.extend(float(value) for value in state["recent"])
