"""What watches a run: curves, the last validation, the progress bar, guards."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mpframe.amax_record import AmaxRecord
from mpframe.errors import DivergedError
from mpframe.evaluation import Evaluation
from mpframe.interruption import Interruption
from mpframe.loss_scaling import Static
from mpframe.memory import peak_memory
from mpframe.precision import JointOptimizer
from mpframe.step import StepResult
from mpframe.throughput import Throughput
from mpframe.tracking import Tag, Tracker, metric_tag
from mpframe.trainer import Callback, Trainer

log = logging.getLogger(__name__)


class Curves(Callback):
    """Writes the run's scalars to TensorBoard; the x axis is the number of steps tried.

    What was written at the last step is part of a checkpoint, and a resumed run writes it again: a
    run may have been stopped between a step's training scalars and its validation's.

    Args:
        tracker: where they go.
        log_every: steps between two writes of the training scalars; a skipped step is always
            written.
        throughput: gives the speed since the last write; comes before this one.
    """

    def __init__(self, tracker: Tracker, log_every: int, throughput: Throughput) -> None:
        self.train_loss: float | Tensor | None = None
        self._tracker = tracker
        self._log_every = log_every
        self._throughput = throughput

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log the step where it is due."""
        if result.loss is not None:
            self.train_loss = result.loss
        attempts = trainer.progress.attempts
        if attempts % self._log_every == 0 or trainer.progress.skipped_in_a_row:
            self._tracker.scalars(attempts, self._of_step(trainer, result))

    def after_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Log the validation."""
        values = {Tag.LOSS_VAL: evaluation.loss, metric_tag(evaluation.metric): evaluation.value}
        self._tracker.scalars(trainer.progress.attempts, values)

    def before_save(self, trainer: Trainer) -> None:
        """Wait until the curves are in their file: none is to be older than a checkpoint."""
        self._tracker.flush()

    def state_dict(self) -> dict[str, Any]:
        """The last loss, and what was written at the last step, by whomever."""
        loss = None if self.train_loss is None else float(self.train_loss)
        return {"train_loss": loss, "last_step": self._tracker.last_step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the last loss, and write again what was written at the last step."""
        loss = state["train_loss"]
        self.train_loss = None if loss is None else float(loss)
        self._tracker.write_again(state["last_step"])

    def _of_step(self, trainer: Trainer, result: StepResult) -> dict[str, float | Tensor]:
        values: dict[str, float | Tensor] = {
            Tag.LR: trainer.optimizer.param_groups[0]["lr"],
            Tag.GRAD_NORM: result.grad_norm,
            Tag.GRAD_AMAX: result.amax,
            Tag.SCALE: result.scale,
            Tag.SKIPPED_TOTAL: trainer.progress.skipped,
            Tag.PEAK_BYTES: peak_memory(),
        }
        if result.loss is not None:
            values[Tag.LOSS_TRAIN] = result.loss
        for name, part in (result.parts or {}).items():
            values |= _of_part(trainer, name, part)
        for owner, scaler in trainer.scalers.items():
            for tag, name in ((Tag.LOG2_MEAN, "log2_mean"), (Tag.LOG2_STD, "log2_std")):
                statistic = getattr(scaler, name, None)
                if statistic is not None:
                    values[tag.of(owner)] = statistic
        values[Tag.SAMPLES_PER_SECOND] = self._throughput.since_last_asked()
        return values


def _of_part(trainer: Trainer, name: str, part: StepResult) -> dict[str, float | Tensor]:
    """The scalars of one of several optimizers."""
    values: dict[str, float | Tensor] = {
        Tag.GRAD_NORM.of(name): part.grad_norm,
        Tag.GRAD_AMAX.of(name): part.amax,
        Tag.SCALE.of(name): part.scale,
        Tag.SKIPPED_TOTAL.of(name): trainer.progress.part_skips.get(name, 0),
    }
    if isinstance(trainer.optimizer, JointOptimizer):
        values[Tag.LR.of(name)] = trainer.optimizer.parts[name].param_groups[0]["lr"]
    if part.loss is not None:
        values[Tag.LOSS_TRAIN.of(name)] = part.loss
    return values


class RecordAmax(Callback):
    """Keeps the largest gradient of every step in the run's folder, for replays.

    Args:
        folder: the run's folder.
        kept: steps already recorded that stay, for a resumed run.
        on_error: `stop` or `warn` where the disk is full.
    """

    def __init__(self, folder: Path, kept: int, on_error: str = "stop") -> None:
        self._record = AmaxRecord(folder, kept, on_error)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Keep the step's amax."""
        self._record.add(result.amax)

    def before_save(self, trainer: Trainer) -> None:
        """Write what was kept: a checkpoint counts on it."""
        self.flush()

    def flush(self) -> None:
        """Write what was kept."""
        self._record.flush()


class LastEvaluation(Callback):
    """Keeps the last validation for the summary."""

    def __init__(self) -> None:
        self.value: Evaluation | None = None

    def after_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
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


class SaturationWarning(Callback):
    """Says after each epoch which half weights stand at the end of their format's range."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Warn where there are any; one transfer from the device."""
        message = trainer.optimizer.saturation_warning(trainer.model)
        if message:
            log.warning("warning: %s", message)


class SpikeReport(Callback):
    """Says which loss was a spike, and ends the run where the policy is to stop."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Warn of a spike, or raise.

        Raises:
            DivergedError: the loss is a spike and `trainer.on_loss_spike` is stop; the step was
                left out.
        """
        spikes = trainer.spikes
        if spikes is None or result.loss is None or not bool(spikes.spiked):
            return
        text = (
            f"step {trainer.progress.attempts}: loss {float(result.loss):.4g} is a spike, more "
            f"than {spikes.factor:g} times the median {float(spikes.median):.4g} of the last steps"
        )
        if spikes.policy == "stop":
            raise DivergedError(
                f"trainer.on_loss_spike=stop: {text}; look at the batch, lower optimizer.lr, or "
                "use trainer.on_loss_spike=skip"
            )
        log.warning("warning: %s%s", text, "; skipped" if spikes.policy == "skip" else "")


class SkipGuard(Callback):
    """Ends a run that only skips, and calls one that came to its end so what it is.

    Args:
        limit: skipped steps in a row that end it.
        hint: gives a last clause for its reason, or "".
        tried: skips in a row that a scaler may make to try a higher scale: its hysteresis.
    """

    def __init__(self, limit: int, hint: Callable[[], str] = str, tried: int = 1) -> None:
        self._limit = limit
        self._hint = hint
        self._tried = tried
        self._last: StepResult | None = None

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Raise where the limit is reached.

        Raises:
            DivergedError: says whether the forward pass or only the gradients were not finite.
        """
        self._last = result
        if trainer.progress.skipped_in_a_row >= self._limit:
            raise self._diverged(trainer, f"trainer.max_consecutive_skips={self._limit} reached")

    def after_fit(self, trainer: Trainer) -> None:
        """Raise where nothing was learnt, or not to the end.

        Raises:
            DivergedError: no step was applied, the last ones were all skipped, or the last one was
                applied at a loss that is not finite, as an optimizer with a closure does.
        """
        in_a_row, attempts = trainer.progress.skipped_in_a_row, trainer.progress.attempts
        if 0 < in_a_row == attempts:
            raise self._diverged(trainer, f"no step was applied, {in_a_row} were skipped")
        if in_a_row > self._tried:
            raise self._diverged(trainer, f"the last {in_a_row} steps were skipped")
        loss = None if self._last is None else self._last.loss
        if not in_a_row and loss is not None and not bool(torch.isfinite(loss)):
            raise self._diverged(trainer, "the last step was applied at a loss that is not finite")

    def _diverged(self, trainer: Trainer, what: str) -> DivergedError:
        where, part = "", self._last
        if part is not None and part.parts is not None:
            in_a_row = trainer.progress.part_skips_in_a_row
            worst = max(in_a_row, key=lambda name: in_a_row[name])
            where, part = f" by optimizer.parts.{worst}", part.parts[worst]
        why = "" if part is None else f": {_cause(trainer, part)}"
        return DivergedError(f"{what}{where}{why}{self._hint()}")


def _cause(trainer: Trainer, result: StepResult) -> str:
    """Why the last step was skipped, and what may help."""
    if trainer.spikes is not None and bool(trainer.spikes.spiked):
        return (
            f"the loss stays above {trainer.spikes.factor:g} times the median of the applied "
            "steps: lower optimizer.lr, raise trainer.loss_spike_factor, or resume from an older "
            "checkpoint"
        )
    if result.loss is not None and not bool(torch.isfinite(result.loss)):
        return (
            "the loss itself is not finite, so scaling cannot help: lower optimizer.lr, look at "
            "the data, or pin the overflowing module to fp32 in ops.modules"
        )
    static = any(isinstance(scaler, Static) for scaler in trainer.scalers.values())
    option = "loss_scaling.scale" if static else "loss_scaling.min_scale"
    return (
        f"the loss is finite and its gradients overflow at scale {float(result.scale):g}: "
        f"lower {option} or pin the overflowing module to fp32 in ops.modules"
    )


class StopOnSignal(Callback):
    """Ends a run that was asked to stop: between two steps, or between two validated batches.

    Args:
        interruption: knows whether a signal came. Comes last: all else is done with the step.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def during_evaluation(self, trainer: Trainer) -> None:
        """Abandon the validation where a signal came; a resumed run makes it anew."""
        self._interruption.raise_if_received()

    def between_steps(self, trainer: Trainer) -> None:
        """Raise RunInterrupted where a signal came."""
        self._interruption.raise_if_received()


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

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move on; the texts are refreshed only as often as the bar is drawn."""
        drawn = self._bar.update(1)
        if drawn and result.loss is not None:
            words = {"loss": f"{float(result.loss):.4g}", "scale": f"{float(result.scale):g}"}
            words["skipped"] = str(trainer.progress.skipped)
            self._bar.set_postfix({**words, **self._validated}, refresh=False)

    def after_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Show the validation's result from now on."""
        self._validated = {f"val_{evaluation.metric}": f"{evaluation.value:.4f}"}

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()
