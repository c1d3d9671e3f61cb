"""The progress bar."""

from typing import Any

from tqdm import tqdm

from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.trainer import Trainer


class Bar(Callback):
    """A progress bar on stderr: steps, loss, scale, skipped steps, and the last validation.

    Args:
        total: planned steps.
        done: steps already tried, for a resumed run.
        shown: False draws nothing.
    """

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self._bar: Any = tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
            leave=False,
        )
        self._validated: dict[str, str] = {}

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move on; the texts are refreshed only as often as the bar is drawn."""
        drawn = self._bar.update(1)
        if drawn and result.loss is not None:
            words = {"loss": f"{float(result.loss):.4g}", "scale": f"{float(result.scale):g}"}
            words["skipped"] = str(trainer.progress.skipped)
            self._bar.set_postfix({**words, **self._validated}, refresh=False)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Show the validation's result from now on."""
        self._validated = {f"val_{evaluation.metric}": f"{evaluation.value:.4f}"}

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()
