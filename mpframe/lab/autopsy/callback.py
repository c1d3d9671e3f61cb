"""The autopsy during a run: evidence, replays, a diagnosis, a report.

A step is examined if

    its loss is not finite
    it was skipped at the scaler's floor, or without a scaler: there is no lower scale
    it is the last of so many skipped steps in a row

Until then the callback only keeps the batch and the random states of the current step. A skipped
step does not change weights or buffers.
"""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpframe.checkpoint.state import RandomState
from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import DivergedError, MpframeError, first_line
from mpframe.core.step_result import StepResult
from mpframe.core.tree import map_tensors
from mpframe.lab.hints import scaling_of
from mpframe.training.callbacks.guards import spikes_of
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

if TYPE_CHECKING:
    from mpframe.lab.autopsy.evidence import Evidence  # It loads the replays.

log = logging.getLogger(__name__)

_MOST = 3  # reports in a run. A fourth would say nothing new.


class Autopsy(Callback):
    """An examination of a failed step, once in a row of skipped steps.

    Of skipped steps the last of `after` in a row is examined, or of `limit`, which end the run.
    """

    def __init__(self, after: int, limit: int) -> None:
        # The report on the current row of skipped steps, and its diagnosis if that is a fault.
        self.written: tuple[Path, str] | None = None
        self._after = min(after, limit)
        self._step: tuple[Sequence[Batch], RandomState, int, int] | None = None
        self._first_loss: float | Tensor | None = None
        self._reports, self._examined = 0, False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Make the error that ended the run name the report, and its diagnosis as the cause."""
        if isinstance(error, DivergedError) and self.written is not None:
            path, diagnosis = self.written
            what = f"{str(error).partition(': ')[0]}: {diagnosis}" if diagnosis else str(error)
            error.args = (f"{what}; see {path}",)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        random, progress = RandomState.now(trainer.device), trainer.progress
        self._step = (batches, random, progress.epoch, progress.batch)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._first_loss = result.loss if self._first_loss is None else self._first_loss
        if not trainer.progress.skipped_in_a_row:
            self.written, self._examined = None, False
        elif self._examined or self._reports == _MOST:
            pass
        elif reason := self._reason(trainer, result):
            self._examined = True
            self._reports += 1
            self._examine(trainer, result, reason)
        self._step = None  # The batch is not needed any more.

    def on_step_end(self, trainer: Trainer) -> None:
        """Read the verdict before the next step: the evidence needs the step's own state."""
        trainer.read_verdicts()

    def state_dict(self) -> dict[str, Any]:
        """The loss of the run's first step."""
        return {"first_loss": None if self._first_loss is None else float(self._first_loss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first_loss = state["first_loss"]

    def _reason(self, trainer: Trainer, result: StepResult) -> str | None:
        spikes = spikes_of(trainer)
        if spikes is not None and bool(spikes.spiked):
            return None  # Skipped because the loss is high, not because of its format.
        # The loss of an accumulated step is nan if all micro-batches were dropped, for any reason.
        loss = result.loss if result.dropped is None else None
        if loss is not None and not torch.isfinite(loss):
            return f"the loss is {float(loss):g}"
        floors = floors_of(trainer)
        for name, part in _results(trainer, result).items():
            scale = float(part.scale)
            if bool(part.skipped) and scale <= floors.get(name, scale):
                what = "at the scaler's floor" if name in floors else "without a loss scaler"
                return f"the step was skipped {what}"
        in_a_row = trainer.progress.skipped_in_a_row
        return f"{in_a_row} steps in a row were skipped" if in_a_row >= self._after else None

    def _examine(self, trainer: Trainer, result: StepResult, reason: str) -> None:
        """Examine the micro-batches of all ranks on rank 0, or keep them with divided weights."""
        # The replays are loaded when a step has failed: most runs need none.
        from mpframe.lab.autopsy import evidence
        from mpframe.lab.autopsy.diagnosis import Kind
        from mpframe.lab.autopsy.report import examine, write_report

        step, written = self._evidence(trainer, result, reason), None
        divided, run = trainer.comm.sharding is not None, self._context.folder
        weights = evidence.gather_weights(trainer) if divided else None
        if trainer.comm.is_main:
            try:
                weights = trainer.weights() if weights is None else weights
                folder = evidence.save(run, step, weights, self._context.config)
                if divided:  # A replay would wait for the other ranks.
                    command = f"mpframe autopsy run={shlex.quote(str(run))} step={step.step}"
                    log.warning("warning: %s; one process examines it: %s", reason, command)
                    written = folder, ""
                else:
                    report = examine(step, trainer)
                    path = write_report(folder, report)
                    log.warning("warning: %s\n%s", reason, report.text(path))
                    diagnosis = report.title.partition(": ")[2]
                    written = path, "" if diagnosis == Kind.NO_FAULT.value else diagnosis
            except (MpframeError, OSError, RuntimeError) as error:  # Most often: no memory.
                log.warning("warning: the autopsy of a failed step failed: %s", first_line(error))
        self.written = trainer.comm.broadcast_object(written)

    def _evidence(self, trainer: Trainer, result: StepResult, reason: str) -> "Evidence":
        from mpframe.lab.autopsy.evidence import Evidence

        assert self._step is not None  # `on_step_begin` came first.
        batches, random, epoch, batch = self._step
        samples = [self._context.train.batch_ids(epoch, batch + n) for n in range(len(batches))]
        mine = list(zip(batches, samples, strict=True))
        gathered = trainer.comm.gather_object(map_tensors(lambda tensor: tensor.cpu(), mine))
        parts = [part for of_ranks in zip(*gathered, strict=True) for part in of_ranks]
        results = _results(trainer, result)
        return Evidence(
            step=trainer.progress.global_step,
            reason=reason,
            batches=[part for part, _ in parts],
            samples=[ids.tolist() for _, ids in parts],
            epoch=epoch,
            batch=batch,
            scales={name: float(part.scale) for name, part in results.items()},
            floors=floors_of(trainer),
            scaling=scaling_of(trainer),
            random=random,
            first_loss=self.state_dict()["first_loss"],
            skipped=frozenset(name for name, part in results.items() if bool(part.skipped)),
            world_size=trainer.comm.size,
            updates=trainer.progress.steps,
        )


def floors_of(trainer: Trainer) -> dict[str, float]:
    """Return the floors of the scalers that have one, by the name of the loss."""
    shared, names = trainer.scalers.get(""), [loss.name for loss in trainer.objectives]
    floors = {n: getattr(trainer.scalers.get(n, shared), "floor", None) for n in names}
    return {name: float(floor) for name, floor in floors.items() if floor is not None}


def _results(trainer: Trainer, result: StepResult) -> dict[str, StepResult]:
    parts = result.each()
    return {loss.name: parts.get(loss.name, result) for loss in trainer.objectives}
