"""How long a run lasts, and how far it has come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mpframe.core.errors import CheckpointError
from mpframe.core.step_result import StepResult
from mpframe.core.trainer import StepOptions


@dataclass(frozen=True)
class Plan(StepOptions):
    """How long to train and how often to look, beside the options of a step."""

    epochs: int = 1  #: passes over the data, >= 1
    max_steps: int | None = None  #: stop after this many optimizer steps, or None: after the epochs
    accumulate: int = 1  #: micro-batches per step, >= 1
    eval_every: int | None = None  #: steps between validations, or None: after each epoch

    def total_steps(self, batches: int, progress: "Progress | None" = None) -> int:
        """Return the planned optimizer steps, as if none was skipped, at `batches` an epoch.

        Steps up to `progress`, which a run resumed with other batches made, count as they were.
        """
        progress = progress or Progress()
        planned = progress.global_step + self._steps_in_passes(progress, batches)
        return planned if self.max_steps is None else min(planned, self.max_steps)

    def numbers(self, batches: int, progress: "Progress | None" = None) -> dict[str, int]:
        """Return the numbers that a schedule may need, each at least 1, for `batches` an epoch.

        These are `total_steps`, `epochs` (the last one perhaps in part) and `steps_per_epoch`.
        """
        total = max(1, self.total_steps(batches, progress))
        each = max(1, math.ceil(batches / self.accumulate))
        return {"total_steps": total, "epochs": math.ceil(total / each), "steps_per_epoch": each}

    def steps_left(self, progress: "Progress", batches: int) -> int:
        """Return the steps to the planned end if none is skipped, at `batches` an epoch."""
        left = self._steps_in_passes(progress, batches)
        limit = left if self.max_steps is None else self.max_steps - progress.steps
        return max(0, min(left, limit))

    def _steps_in_passes(self, progress: "Progress", batches: int) -> int:
        """Return the steps of all planned passes from `progress` on."""
        each, present = math.ceil(batches / self.accumulate), batches - progress.batch
        left = (self.epochs - progress.epoch - 1) * each + math.ceil(present / self.accumulate)
        return max(0, left)


@dataclass
class Progress:
    """How far a run has come, as a checkpoint keeps it."""

    steps: int = 0  #: optimizer steps that were applied
    skipped: int = 0  #: optimizer steps that were not
    #: Steps of which the host does not know yet whether they were applied. It is 0 when callbacks
    #: hear of a step, and in a checkpoint.
    pending: int = 0
    skipped_in_a_row: int = 0  #: since the last applied step, by the optimizer that skipped most
    dropped: int = 0  #: micro-batches left out of an accumulated step
    epoch: int = 0  #: passes completed
    batch: int = 0  #: micro-batches used of the present pass
    validated: int = 0  #: global_step at the last validation
    #: The same for each of several optimizers.
    part_skips: dict[str, int] = field(default_factory=dict)
    part_skips_in_a_row: dict[str, int] = field(default_factory=dict)

    @property
    def global_step(self) -> int:
        """Steps tried, applied or skipped: the x axis of every curve."""
        return self.steps + self.skipped + self.pending

    @property
    def mostly_skipped(self) -> str | None:
        """A line if more steps were skipped than applied, else None."""
        if self.skipped <= self.steps:
            return None
        steps = "step" if self.steps == 1 else "steps"
        return (
            f"{self.steps} {steps} applied, {self.skipped} skipped: most of the run was in vain; "
            "start from a lower loss scale, or see why its gradients overflow (mpframe doctor)"
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Make the progress that a checkpoint holds. Raises CheckpointError for a wrong count."""
        for name, value in state.items():
            for count in value.values() if isinstance(value, dict) else (value,):
                if type(count) is not int or not 0 <= count < 2**53:
                    raise CheckpointError(
                        f"its progress.{name} is no count but {count!r:.40}; use another checkpoint"
                    )
        return cls(**state)

    def count_batches(self, used: int, per_epoch: int) -> None:
        """Add the micro-batches of a step, the last of which ends the pass."""
        self.batch += used
        if self.batch >= per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0

    def count_step(self, result: StepResult) -> None:
        """Count a step whose verdict is known. It is applied if one of its optimizers moved."""
        skipped, dropped = result.verdict or result.known
        self.steps += not skipped
        self.skipped += skipped
        self.dropped += dropped
        if result.parts is None:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
            return
        for name, part in result.parts.items():
            skipped = part.known.skipped
            self.part_skips[name] = self.part_skips.get(name, 0) + skipped
            before = self.part_skips_in_a_row.get(name, 0)
            self.part_skips_in_a_row[name] = before + 1 if skipped else 0
        self.skipped_in_a_row = max(self.part_skips_in_a_row.values())
