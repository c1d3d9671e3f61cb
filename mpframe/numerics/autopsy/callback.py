"""The autopsy during a run: evidence, replays, a diagnosis, a report.

A step is examined if

    its loss is not finite
    it was skipped at the scaler's floor, or without a scaler: there is no lower scale
    it is the last of so many skipped ones in a row

Before that the callback only keeps the batch and the random states of the current step. A skipped
step does not change weights or buffers.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.distributed.world import World
from mpframe.errors import DivergedError, MpframeError, first_line
from mpframe.files.durable import write_atomically
from mpframe.numerics.autopsy import evidence as evidence_of
from mpframe.numerics.autopsy.case import RandomState
from mpframe.numerics.autopsy.diagnosis import Kind, diagnose
from mpframe.numerics.autopsy.evidence import Evidence
from mpframe.numerics.autopsy.report import Report, report_on
from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.loader import Batch
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of, map_tensors

log = logging.getLogger(__name__)

REPORT = "report.md"
_MOST = 3  # reports in a run: if a model fails again and again, a fourth report says nothing new


class Autopsy(Callback):
    """Examines a failed step, once in a row of skipped steps.

    Args:
        when: `on_trouble`, or `off`.
        after: skipped steps in a row after which the last of them is examined.
        limit: skipped steps in a row that end the run: the last of them is examined, too.

    Attributes:
        written: the report on the present row of skipped steps, and its diagnosis, empty if that
            is no fault; None if there is no report.
    """

    _context: RunContext

    def __init__(self, when: str, after: int, limit: int) -> None:
        self.written: tuple[Path, str] | None = None
        self._enabled, self._after = when != "off", min(after, limit)
        self._device: torch.device | None = None
        self._step: tuple[Sequence[Batch], RandomState, int, int] | None = None
        self._first_loss: float | Tensor | None = None
        self._reports, self._examined = 0, False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Take the folder for reports, and the loader that knows which samples a batch has."""
        self._context = context

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Let the error that ended the run name the report, and its diagnosis for the cause."""
        if isinstance(error, DivergedError) and self.written is not None:
            path, diagnosis = self.written
            what = f"{str(error).partition(': ')[0]}: {diagnosis}" if diagnosis else str(error)
            error.args = (f"{what}; see {path}",)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Keep what the step starts from."""
        if not self._enabled:
            return
        if self._device is None:
            self._device = device_of(trainer.model)
        progress = trainer.progress
        self._step = (batches, RandomState.now(self._device), progress.epoch, progress.batch)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Examine the step if that is due."""
        if not self._enabled:
            return
        if self._first_loss is None:
            self._first_loss = result.loss
        if not trainer.progress.skipped_in_a_row:
            self.written, self._examined = None, False
        elif not self._examined and self._reports < _MOST:
            reason = self._reason(trainer, result)
            if reason is not None:
                self._examined = True
                self._reports += 1
                self._examine(trainer, result, reason)
        self._step = None  # The batch is not needed any more.

    def on_step_end(self, trainer: Trainer) -> None:
        """Read the verdict before the next step: the evidence needs the step's own state."""
        if self._enabled:
            trainer.read_verdicts()

    def state_dict(self) -> dict[str, Any]:
        """The loss of the run's first step."""
        return {"first_loss": None if self._first_loss is None else float(self._first_loss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the loss that a checkpoint saved."""
        self._first_loss = state["first_loss"]

    def _reason(self, trainer: Trainer, result: StepResult) -> str | None:
        if trainer.spikes is not None and bool(trainer.spikes.spiked):
            return None  # Skipped because the loss is high, not because of its format.
        # The loss of an accumulated step is nan if all micro-batches were dropped, for any reason.
        if result.dropped is None and not _finite(result.loss):
            return f"the loss is {float(result.loss):g}"  # type: ignore[arg-type]
        floors = evidence_of.floors_of(trainer)
        skipped = evidence_of.skipped_of(trainer, result)
        for name, scale in evidence_of.scales_of(trainer, result).items():
            if name in skipped and scale <= floors.get(name, scale):
                what = "at the scaler's floor" if name in floors else "without a loss scaler"
                return f"the step was skipped {what}"
        in_a_row = trainer.progress.skipped_in_a_row
        return f"{in_a_row} steps in a row were skipped" if in_a_row >= self._after else None

    def _examine(self, trainer: Trainer, result: StepResult, reason: str) -> None:
        """Rank 0 examines the micro-batches of all ranks, as if they were its own."""
        step = self._evidence(trainer, result, reason)
        written = self._reported(step, trainer) if trainer.world.is_main else None
        self.written = trainer.world.broadcast_object(written)

    def _reported(self, step: Evidence, trainer: Trainer) -> tuple[Path, str] | None:
        try:
            folder = evidence_of.save(
                self._context.folder, step, trainer.weights(), self._context.config
            )
            report = examine(step, trainer)
            written = write_report(folder, report)
        except (
            MpframeError,
            OSError,
            RuntimeError,
        ) as error:  # Most often there is no memory for the replays.
            log.warning("warning: the autopsy of a failed step failed: %s", first_line(error))
            return None
        log.warning("warning: %s\n%s", step.reason, report.text(written))
        diagnosis = report.title.partition(": ")[2]
        return written, "" if diagnosis == Kind.NO_FAULT.value else diagnosis

    def _evidence(self, trainer: Trainer, result: StepResult, reason: str) -> Evidence:
        if self._step is None:
            raise RuntimeError("the step was not announced")
        batches, random, epoch, batch = self._step
        samples = [self._context.train.batch_ids(epoch, batch + n) for n in range(len(batches))]
        of_all = _of_all_ranks(trainer.world, list(zip(batches, samples, strict=True)))
        first = None if self._first_loss is None else float(self._first_loss)
        return Evidence(
            step=trainer.progress.global_step,
            reason=reason,
            batches=[own for own, _ in of_all],
            samples=[ids.tolist() for _, ids in of_all],
            epoch=epoch,
            batch=batch,
            scales=evidence_of.scales_of(trainer, result),
            floors=evidence_of.floors_of(trainer),
            scaling=evidence_of.scaling_of(trainer),
            random=random,
            first_loss=first,
            skipped=evidence_of.skipped_of(trainer, result),
            zero_eps=evidence_of.zero_eps_of(trainer),
            world_size=trainer.world.size,
        )


def _of_all_ranks(world: World, own: list[tuple[Batch, Tensor]]) -> list[tuple[Batch, Tensor]]:
    """The micro-batches of all ranks, with their samples; on other ranks than 0 there are none."""
    if world.size == 1:
        return own
    gathered = world.gather_object(map_tensors(lambda tensor: tensor.cpu(), own))
    return [part for parts in zip(*gathered, strict=True) for part in parts]


def _finite(loss: Tensor | None) -> bool:
    return loss is None or bool(torch.isfinite(loss))


def examine(step: Evidence, trainer: Trainer) -> Report:
    """Replay a step with a trainer that has its weights, and say what is wrong with it."""
    case = step.case(trainer)
    return report_on(diagnose(case), case, step)


def write_report(folder: Path, report: Report) -> Path:
    """Write a report beside its evidence; returns its path."""
    path = folder / REPORT
    write_atomically(path, report.markdown())
    return path
