"""Keeps the largest gradient of every step."""

from mpframe.optim.step_result import StepResult
from mpframe.tracking.amax_record import AmaxRecord
from mpframe.training.callback import Callback
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer


class RecordAmax(Callback):
    """Keeps the largest gradient of every step in the run's folder, for replays.

    Args:
        on_error: `stop` or `warn` if the disk is full.
    """

    _record: AmaxRecord

    def __init__(self, on_error: str = "stop") -> None:
        self._on_error = on_error

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Open the record, and cut off the steps that a resumed run takes again."""
        self._record = AmaxRecord(context.folder, trainer.progress.global_step, self._on_error)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Keep the step's amax."""
        self._record.add(result.amax)

    def on_save(self, trainer: Trainer) -> None:
        """Write all values so far, because a checkpoint relies on them."""
        self._record.flush()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write all values so far."""
        self._record.flush()
