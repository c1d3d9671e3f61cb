"""Callbacks that write numbers: TensorBoard's curves, metrics.csv, each step's largest gradient."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.files.durable import append_whole, write_atomically
from mpframe.tracking.environment import peak_memory
from mpframe.tracking.records import AMAX_FILE, MetricsCsv, read_lines
from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import read_step
from mpframe.training.evaluation import Evaluation
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_COLUMNS = (
    *("step", "epoch", "train_loss", "learning_rate", "grad_norm", "grad_amax"),
    *("loss_scale", "skipped_steps", "val_loss", "test_loss"),
)
_HELD = 256  # steps between two transfers of their largest gradients from the device


class CsvLog(Callback):
    """Writes a row of unscaled numbers for every step that is logged or validated.

    A row is written at the end of its step. A checkpoint holds the last row, because a run may be
    stopped in that step's validation. The last row is the test's.
    """

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._last: dict[str, float | int] = {}
        self._of_step: dict[str, Any] = {}
        self._pending = False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the table without the rows of steps that a resumed run takes again."""
        global_step = trainer.progress.global_step
        names = trainer.evaluator.metrics if trainer.evaluator else ()
        metrics = [f"{split}_{name}" for split in ("val", "test") for name in names]
        self._file = MetricsCsv(context.folder, [*_COLUMNS, *metrics], global_step)
        self._pending = bool(global_step) and self._last.get("step") == global_step

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._of_step = {
            "train_loss": result.loss,
            "learning_rate": trainer.optimizer.param_groups[0]["lr"],
            "grad_norm": result.grad_norm,
            "grad_amax": result.amax,
            "loss_scale": result.scale,
            "skipped_steps": trainer.progress.skipped,
        }
        if trainer.progress.global_step % self._log_every == 0:
            self._note(trainer, **_numbers(self._of_step))

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        metrics = {f"val_{name}": value for name, value in evaluation.metrics.items()}
        self._note(trainer, **_numbers(self._of_step), val_loss=evaluation.loss, **metrics)

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        metrics = {f"test_{name}": value for name, value in evaluation.metrics.items()}
        self._write()
        self._file.add(_at(trainer) | {"test_loss": evaluation.loss, **metrics})

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.global_step % self._log_every == 0:
            trainer.read_verdicts()
        self._write()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write the row of a step that the run was stopped in."""
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the last row, and the numbers of the last step, which may yet be validated."""
        return {"row": dict(self._last), "of_step": _numbers(self._of_step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = _numbers(state["row"])
        self._of_step = _numbers(state["of_step"])

    def _note(self, trainer: Trainer, **values: float | int) -> None:
        if self._last.get("step") != trainer.progress.global_step:
            self._write()
            self._last = _at(trainer)
        self._last |= values
        self._pending = True

    def _write(self) -> None:
        if self._pending:
            self._pending = False
            self._file.add(self._last)


def _at(trainer: Trainer) -> dict[str, float | int]:
    return {"step": trainer.progress.global_step, "epoch": trainer.progress.epoch}


def _numbers(values: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the values that are not None as plain numbers, and wait for a device."""
    return {
        str(name): value if type(value) is int else float(value)
        for name, value in values.items()
        if value is not None
    }


class RecordAmax(Callback):
    """Keeps the largest gradient of every step in the run's folder, for replays.

    Values wait on the device until many are moved at once. If there is no room, they wait on.
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the record without the steps that a resumed run takes again."""
        self._path, kept = context.folder / AMAX_FILE, trainer.progress.global_step
        older = read_lines(self._path) if kept else []
        write_atomically(self._path, b"".join(older[:kept]))

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._waiting.append(result.amax.detach())
        if len(self._waiting) >= _HELD:
            self._flush()

    def on_save(self, trainer: Trainer) -> None:
        self._flush()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._flush()

    def _flush(self) -> None:
        values = torch.stack(self._waiting).double().log2().tolist() if self._waiting else []
        append_whole(self._path, "".join(f"{value:.9g}\n" for value in values).encode())
        self._waiting.clear()


class Curves(Callback):
    """Writes the run's scalars to TensorBoard, over the number of steps tried.

    The training scalars are written every `log_every` steps, and at skipped ones. A checkpoint
    keeps its last step's, and a resumed run writes them again: it may have been stopped between a
    step's training scalars and its validation's.
    """

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._last_step: tuple[int, list[Any]] | None = None

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context, self._tracker = context, context.tracker
        self._point = self._stand()
        if self._last_step is not None:
            self._tracker.tensorboard.write_again(*self._last_step)

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
        return {"last_step": self._tracker.tensorboard.last_step()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = read_step(state["last_step"])

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

    def _stand(self) -> tuple[int, float, float]:
        """Return samples, training seconds, and the seconds in which the trainer waited."""
        throughput = self._context.throughput
        return throughput.samples, throughput.train_seconds, self._context.train.waited

    def _speed(self) -> dict[str, float | Tensor]:
        """Measure the steps since the last point: their pace, and the share of waiting for data."""
        before, self._point = self._point, self._stand()
        samples, seconds, waited = (n - b for n, b in zip(self._point, before, strict=True))
        return {Tag.SAMPLES_PER_SECOND: samples / seconds, Tag.INPUT_FRACTION: waited / seconds}


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
