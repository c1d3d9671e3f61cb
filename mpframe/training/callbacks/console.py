"""Callbacks that write to the terminal: log lines, and a progress bar."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from mpframe.core.callback import Callback
from mpframe.core.ranges import make_range_error
from mpframe.core.step_result import StepResult
from mpframe.files.text import drop_output
from mpframe.training.evaluation import LOSS, Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


class LogLines(Callback):
    """Logs a line at every validation, and a debug line every `log_every` steps.

    Once, it warns of a step whose gradients are all 0. The time left follows from the pace of this
    start of the run so far, validations included.
    """

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._amax: Tensor | None = None
        self._warned = False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context
        self._began, self._first_step = time.monotonic(), trainer.progress.global_step

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._amax = result.amax
        if self._due(trainer):
            loss = "" if result.loss is None else f"loss {float(result.loss):.4g}, "
            norm = f"gradient norm {float(result.grad_norm):.4g}"
            log.debug("%s: %s%s, %s", self._place(trainer), loss, norm, _state(trainer))
            self._warn_of_zeros(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if self._due(trainer):
            trainer.read_verdicts()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        loss = self._context.results.loss
        words = [] if loss is None else [f"train loss {float(loss):.4g}"]
        step = trainer.progress.global_step
        words.append(f"val loss {evaluation.loss:.4g}{self._beside_best(LOSS, step)}")
        for name, value in evaluation.metrics.items():
            words.append(f"{name} {value:.4f}{self._beside_best(name, step)}")
        words.append(_state(trainer))
        if left := self._time_left(trainer):
            words.append(f"{left} left")
        log.info("%s: %s", self._place(trainer), ", ".join(words))
        self._warn_of_zeros(trainer)

    def _warn_of_zeros(self, trainer: Trainer) -> None:
        if not self._warned and self._amax is not None and float(self._amax) == 0:
            self._warned = True
            log.warning(
                "warning: all gradients of step %d are 0, and nothing is learnt; mpframe doctor "
                "with the same options says whether the format loses them",
                trainer.progress.global_step,
            )

    def _due(self, trainer: Trainer) -> bool:
        step = trainer.progress.global_step
        return step % self._log_every == 0 and log.isEnabledFor(logging.DEBUG)

    def _place(self, trainer: Trainer) -> str:
        progress, batches = trainer.progress, len(self._context.train)
        step, total = progress.global_step, _total_steps(trainer, batches)
        return f"epoch {progress.epoch + progress.batch / batches:.3g}, step {step}/{total}"

    def _beside_best(self, name: str, step: int) -> str:
        best = self._context.results.best
        if name != best.name or best.value is None:
            return ""
        return " (best)" if step == best.step else f" (best {best.value:.4f} at step {best.step})"

    def _time_left(self, trainer: Trainer) -> str | None:
        steps = trainer.progress.global_step - self._first_step
        left = trainer.plan.steps_left(trainer.progress, len(self._context.train))
        if not steps or not left:
            return None
        return tqdm.format_interval((time.monotonic() - self._began) / steps * left)


def _total_steps(trainer: Trainer, batches: int) -> int:
    return trainer.progress.global_step + trainer.plan.steps_left(trainer.progress, batches)


def _state(trainer: Trainer) -> str:
    """Return the learning rate, the scales and the skipped steps as words."""
    words = [f"lr {float(trainer.optimizer.param_groups[0]['lr']):.3g}"]
    for name, scaler in trainer.scalers.items():
        words.append(" ".join(filter(None, ("scale", name, f"{float(scaler.scale):g}"))))
    return ", ".join([*words, f"{trainer.progress.skipped} skipped"])


class ProgressBar(Callback):
    """A progress bar on stderr, below the log lines: steps, loss, scale, skipped steps.

    Args:
        shown: `on` or True, `off` or False, or `auto`: if stderr is a terminal. Else ConfigError.
        verbosity: `auto` shows no bar if this is `quiet`.
    """

    def __init__(self, shown: str | bool = "auto", verbosity: str = "normal") -> None:
        if shown not in ("auto", "on", "off", True, False):
            raise make_range_error("callbacks.progress_bar.shown", shown, "one of auto, on, off")
        self._disabled: bool | None = shown in ("off", False)
        if shown == "auto":
            self._disabled = True if verbosity == "quiet" else None  # None: tqdm asks stderr.
        self._redirected = ExitStack()

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Draw the bar, which in a resumed run begins at its step."""
        self._batches = len(context.train)
        self._bar: Any = tqdm(disable=True)
        with self._disable_on_error():
            self._bar = tqdm(
                total=_total_steps(trainer, self._batches),
                initial=trainer.progress.global_step,
                unit="step",
                disable=self._disabled,
                dynamic_ncols=True,
                leave=False,
            )
        if not self._bar.disable:
            self._redirected.enter_context(logging_redirect_tqdm())

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move the bar on. Its texts change only when it is drawn."""
        drawn = None
        with self._disable_on_error():
            drawn = self._bar.update(1)
        if drawn and result.loss is not None:
            words = {"loss": f"{float(result.loss):.4g}", "scale": f"{float(result.scale):g}"}
            words["skipped"] = str(trainer.progress.skipped)
            self._bar.total = _total_steps(trainer, self._batches)
            self._bar.set_postfix(words, refresh=False)

    def on_step_end(self, trainer: Trainer) -> None:
        """Read the last steps' verdicts as often as the bar is drawn."""
        bar = self._bar
        if not bar.disable and time.time() - bar.last_print_t >= bar.mininterval:
            trainer.read_verdicts()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._redirected.close()
        with self._disable_on_error():
            self._bar.close()

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """Draw no more, and let the run continue, if stderr's reader or terminal has gone."""
        try:
            yield
        except OSError:
            self._bar.disable = True
            with suppress(AttributeError, OSError, ValueError):  # A notebook's has no file.
                drop_output(sys.stderr)
