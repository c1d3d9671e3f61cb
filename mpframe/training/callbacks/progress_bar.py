"""The progress bar."""

import time
from typing import Any

from tqdm import tqdm

from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class ProgressBar(Callback):
    """A progress bar on stderr: steps, loss, scale, skipped steps, and the last validation.

    Args:
        shown: False draws nothing.
    """

    _bar: Any

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown
        self._validated: dict[str, str] = {}

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Draw it, from where a resumed run goes on."""
        self._bar = tqdm(
            total=trainer.plan.total_steps(len(context.train)),
            initial=trainer.progress.global_step,
            unit="step",
            disable=not self._shown,
            dynamic_ncols=True,
            leave=False,
        )

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move on; the texts are refreshed only as often as the bar is drawn."""
        drawn = self._bar.update(1)
        if drawn and result.loss is not None:
            words = {"loss": f"{float(result.loss):.4g}", "scale": f"{float(result.scale):g}"}
            words["skipped"] = str(trainer.progress.skipped)
            self._bar.set_postfix({**words, **self._validated}, refresh=False)

    def on_step_end(self, trainer: Trainer) -> None:
        """Learn of the last steps as often as the bar is drawn."""
        if self._shown and time.time() - self._bar.last_print_t >= self._bar.mininterval:
            trainer.read_verdicts()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Show the validation's result from now on."""
        self._validated = {f"val_{evaluation.monitor}": f"{evaluation.value:.4f}"}

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Take the bar off the screen."""
        self._bar.close()
