"""Writes a run's curves."""

from typing import Any

from torch import Tensor

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.data.loading import Loader
from mpframe.tracking.environment import peak_memory
from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import Tracker, checked_events
from mpframe.training.callbacks.throughput import Throughput
from mpframe.training.evaluation import Evaluation
from mpframe.training.multi_optimizer import MultiOptimizer
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class Curves(Callback):
    """Writes the run's scalars to TensorBoard, over the number of steps tried.

    The training scalars are written every `log_every` steps, and at skipped ones. A checkpoint
    keeps those of its last step, and a resumed run writes them again: it may have been stopped
    between a step's training scalars and its validation's.
    """

    _tracker: Tracker
    _throughput: Throughput
    _train: Loader
    _waited: float

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._last_step: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._tracker, self._throughput = context.tracker, context.throughput
        self._train, self._waited = context.train, context.train.waited
        if self._last_step is not None:
            self._tracker.write_again(self._last_step)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        global_step = trainer.progress.global_step
        if global_step % self._log_every == 0 or trainer.progress.skipped_in_a_row:
            self._tracker.scalars(global_step, self._of_step(trainer, result))

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.global_step % self._log_every == 0:
            trainer.read_verdicts()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._log(trainer, evaluation, Tag.LOSS_VAL, "val")

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._log(trainer, evaluation, Tag.LOSS_TEST, "test")

    def on_save(self, trainer: Trainer) -> None:
        """Wait until the curves are in their file, which must not be older than a checkpoint."""
        self._tracker.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._tracker.last_step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = checked_events(state["last_step"])

    def _log(self, trainer: Trainer, evaluation: Evaluation, loss: str, split: str) -> None:
        values = {loss: evaluation.loss}
        values |= {metric_tag(name, split): value for name, value in evaluation.metrics.items()}
        self._tracker.scalars(trainer.progress.global_step, values)

    def _of_step(self, trainer: Trainer, result: StepResult) -> dict[str, float | Tensor]:
        optimizer, progress = trainer.optimizer, trainer.progress
        values = _scalars(result, "", progress.skipped)
        values |= {Tag.LR: optimizer.param_groups[0]["lr"], Tag.PEAK_BYTES: peak_memory()}
        for group in optimizer.param_groups:
            if "name" in group:
                values[Tag.LR.of(group["name"])] = group["lr"]
        for name, part in (result.parts or {}).items():
            values |= _scalars(part, name, progress.part_skips.get(name, 0))
            if isinstance(optimizer, MultiOptimizer):
                values[Tag.LR.of(name)] = optimizer.parts[name].param_groups[0]["lr"]
        for name, scaler in trainer.scalers.items():
            for tag, attribute in ((Tag.LOG2_MEAN, "log2_mean"), (Tag.LOG2_STD, "log2_std")):
                statistic = getattr(scaler, attribute, None)
                if statistic is not None:
                    values[tag.of(name)] = statistic
        return values | self._speed()

    def _speed(self) -> dict[str, float | Tensor]:
        """Measure the steps since the last point: their pace, and the share of waiting for data."""
        samples, seconds = self._throughput.since_last_asked()
        before, self._waited = self._waited, self._train.waited
        return {
            Tag.SAMPLES_PER_SECOND: samples / seconds,
            Tag.INPUT_FRACTION: (self._waited - before) / seconds,
        }


def _scalars(result: StepResult, name: str, skipped: int) -> dict[str, float | Tensor]:
    """Return the scalars of the step, or of one of several optimizers by its name."""
    values: dict[str, float | Tensor] = {
        Tag.GRAD_NORM.of(name): result.grad_norm,
        Tag.GRAD_AMAX.of(name): result.amax,
        Tag.SCALE.of(name): result.scale,
        Tag.LOG2_SCALE.of(name): result.scale.log2(),
        Tag.SKIPPED_TOTAL.of(name): skipped,
    }
    return values if result.loss is None else values | {Tag.LOSS_TRAIN.of(name): result.loss}
