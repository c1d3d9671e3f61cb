"""How long a run is to last, and where it stands: the numbers the trainer's loop goes by."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How long to train and how often to look.

    Attributes:
        epochs: passes over the data, >= 1.
        max_steps: stop after this many optimizer steps; None: after the epochs.
        accumulate: micro-batches per step, >= 1.
        clip_norm: clip the global norm of the unscaled gradients to this; None: do not.
        eval_every: steps between validations; None: after each epoch.
        compile: compile the forward pass and its casts into one graph.
    """

    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    eval_every: int | None = None
    compile: bool = False

    def total_steps(self, batches: int) -> int:
        """Planned optimizer steps at `batches` micro-batches per epoch."""
        planned = self.epochs * math.ceil(batches / self.accumulate)
        return planned if self.max_steps is None else min(planned, self.max_steps)


@dataclass
class Progress:
    """Where a run stands; all of it is in a checkpoint.

    Attributes:
        steps: optimizer steps that were applied.
        skipped: steps that were not; `attempts` is the sum and the x axis of every curve.
        skipped_in_a_row: skipped steps since the last applied one.
        dropped: micro-batches left out of an accumulated step.
        epoch: passes completed.
        batch: micro-batches of the present pass that were used.
    """

    steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    dropped: int = 0
    epoch: int = 0
    batch: int = 0

    @property
    def attempts(self) -> int:
        """Steps tried, applied or skipped."""
        return self.steps + self.skipped
