"""Callbacks that keep numbers: metrics.csv, and the largest gradient of every step."""

from collections.abc import Mapping
from typing import Any

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.tracking.amax_record import AmaxRecord
from mpframe.tracking.metrics_csv import MetricsCsv
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_COLUMNS = (
    *("step", "epoch", "train_loss", "learning_rate", "grad_norm", "grad_amax"),
    *("loss_scale", "skipped_steps", "val_loss", "test_loss"),
)


class CsvLog(Callback):
    """Writes a row of unscaled numbers for every step that is logged or validated.

    A row is written at the end of its step. A checkpoint holds the last row, because a run may be
    stopped in that step's validation. The last row is the test's. `on_error` says whether a full
    disk is to `stop` the run or only `warn`.
    """

    _file: MetricsCsv

    def __init__(self, log_every: int, on_error: str = "stop") -> None:
        self._log_every, self._on_error = log_every, on_error
        self._last: dict[str, float | int] = {}
        self._of_step: dict[str, Any] = {}
        self._pending = False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the table without the rows of steps that a resumed run takes again."""
        global_step = trainer.progress.global_step
        names = trainer.evaluator.metrics if trainer.evaluator else ()
        metrics = [f"{split}_{name}" for split in ("val", "test") for name in names]
        self._file = MetricsCsv(context.folder, [*_COLUMNS, *metrics], global_step, self._on_error)
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
    """Return the values that are not None as plain numbers; waits for those on a device."""
    return {
        str(name): value if type(value) is int else float(value)
        for name, value in values.items()
        if value is not None
    }


class RecordAmax(Callback):
    """Keeps the largest gradient of every step in the run's folder, for replays."""

    _record: AmaxRecord

    def __init__(self, on_error: str = "stop") -> None:
        self._on_error = on_error

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the record without the steps that a resumed run takes again."""
        self._record = AmaxRecord(context.folder, trainer.progress.global_step, self._on_error)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._record.add(result.amax)

    def on_save(self, trainer: Trainer) -> None:
        self._record.flush()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._record.flush()
