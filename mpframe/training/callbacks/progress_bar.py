"""The progress bar."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class ProgressBar(Callback):
    """A progress bar on stderr: steps, loss, scale, skipped steps, last and best validation.

    Lines that are logged to the console go above it.

    Args:
        shown: `on`; `off`; or `auto`: on if stderr is a terminal. True is `on`, False `off`.
        verbosity: `auto` shows no bar if this is `quiet`.
    """

    _bar: Any

    def __init__(self, shown: str | bool = "auto", verbosity: str = "normal") -> None:
        if shown == "auto":
            self._disabled = True if verbosity == "quiet" else None  # None: tqdm asks stderr.
        else:
            self._disabled = shown in ("off", False)
        self._validated: dict[str, str] = {}
        self._redirected = ExitStack()

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Draw the bar; that of a resumed run begins at its step."""
        self._results, self._batches = context.results, len(context.train)
        self._bar = tqdm(disable=True)
        with self._disabled_on_error():
            self._bar = tqdm(
                total=self._total(trainer),
                initial=trainer.progress.global_step,
                unit="step",
                disable=self._disabled,
                dynamic_ncols=True,
                leave=False,
            )
        if not self._bar.disable:
            self._redirected.enter_context(logging_redirect_tqdm())

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move the bar on; its texts change only as often as it is drawn."""
        drawn = None
        with self._disabled_on_error():
            drawn = self._bar.update(1)
        if drawn and result.loss is not None:
            words = {"loss": f"{float(result.loss):.4g}", "scale": f"{float(result.scale):g}"}
            words["skipped"] = str(trainer.progress.skipped)
            self._bar.total = self._total(trainer)
            self._bar.set_postfix({**words, **self._validated}, refresh=False)

    def on_step_end(self, trainer: Trainer) -> None:
        """Ask for the verdicts on the last steps as often as the bar is drawn."""
        if self._bar.disable:
            return
        if time.time() - self._bar.last_print_t >= self._bar.mininterval:
            trainer.read_verdicts()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Show the validation's result, and the best one, from now on."""
        self._validated = {f"val_{evaluation.monitor}": f"{evaluation.value:.4f}"}
        if self._results.best.value is not None:
            self._validated["best"] = f"{self._results.best.value:.4f}"

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Take the bar off the screen."""
        self._redirected.close()
        with self._disabled_on_error():
            self._bar.close()

    @contextmanager
    def _disabled_on_error(self) -> Iterator[None]:
        """Draw no more if whoever read stderr has gone, or its terminal; the run goes on."""
        try:
            yield
        except OSError:
            self._bar.disable = True
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
            )  # Python writes the rest.

    def _total(self, trainer: Trainer) -> int:
        left = trainer.plan.steps_left(trainer.progress, self._batches)
        return trainer.progress.global_step + left
