"""Keeps the largest gradient of every step."""

from pathlib import Path

from mpframe.optim.step_result import StepResult
from mpframe.tracking.amax_record import AmaxRecord
from mpframe.training.callback import Callback
from mpframe.training.trainer import Trainer


class RecordAmax(Callback):
    """Keeps the largest gradient of every step in the run's folder, for replays.

    Args:
        folder: the run's folder.
        kept: steps already recorded that stay, for a resumed run.
        on_error: `stop` or `warn` where the disk is full.
    """

    def __init__(self, folder: Path, kept: int, on_error: str = "stop") -> None:
        self._record = AmaxRecord(folder, kept, on_error)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Keep the step's amax."""
        self._record.add(result.amax)

    def on_save(self, trainer: Trainer) -> None:
        """Write what was kept: a checkpoint counts on it."""
        self.flush()

    def flush(self) -> None:
        """Write what was kept."""
        self._record.flush()
