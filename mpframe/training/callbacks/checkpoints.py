"""When a run is saved, and what goes into the checkpoint.

A checkpoint holds everything that can change the run's future: the trainer's state, every random
generator, and the state of the callbacks. It is taken between two steps.

All ranks save at the same step and rank 0 writes: apart from the random generators, their state is
the same. If they shard the weights, each writes its part.

A save in the background copies the state first, so the run continues while the copy is written. At
most one such save runs at a time, and its error is raised at the next save or at the end. Ranks
that each write a part agree in the background, by connections of their own.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.checkpoint.folder import prune, rank_of, rank_to_beat
from mpframe.checkpoint.saving import on_all, prepare_together
from mpframe.checkpoint.state import OTHER_RANKS, of_other_ranks
from mpframe.core.callback import Callback
from mpframe.core.errors import RunInterrupted
from mpframe.core.tree import device_of
from mpframe.tracking import records_in
from mpframe.tracking.environment import arithmetic
from mpframe.training.evaluation import LOSS
from mpframe.training.parallel.same_weights import refuse_drift
from mpframe.training.run_context import RunContext, has_state
from mpframe.training.trainer import Trainer, run_callbacks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """When to save and what to keep."""

    every: int | None = None  # steps between two, or None: by `minutes`, or else each epoch
    minutes: float | None = None  # between two, or None
    keep_last: int = 2  # how many of the newest are kept, with 0 only the best
    keep_best: int = 0  # how many of the best by validation are kept besides, each saved at once
    background: bool = False  # write while the training continues


class Checkpoints(Callback):
    """Saves the run when its plan says so."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None  # a save in the background
        self._aside: Any = None  # the ranks, for the background
        self._saved: tuple[int, int] | None = None
        self._saved_at, self._said = time.monotonic(), False

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._context = context

    def on_step_end(self, trainer: Trainer) -> None:
        """Save if it is due. After a skipped step only one of the best: the last good one stays."""
        if self._due(trainer):
            trainer.read_verdicts()
            progress = trainer.progress
            good = not progress.skipped_in_a_row
            if good or (progress.steps and self._among_the_best(trainer)):
                self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save the run as it is now, unless this state is saved already.

        A checkpoint that could not be written raises CheckpointError here, later or in `close`.
        """
        stands = trainer.progress.global_step, trainer.progress.validated
        if not trainer.comm.any(self._saved != stands):
            return
        trainer.read_verdicts()
        with self._context.throughput.pause():
            run_callbacks(trainer.callbacks, "on_save", trainer)
            snapshot = self._snapshot(trainer)
            self._saved, self._saved_at = stands, time.monotonic()
            refuse_drift(trainer.comm, stands[0], trainer.weights)
            self._wait(trainer)
            self._write(trainer, snapshot)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        try:
            self._finish_writing()
        finally:
            self._writer.shutdown()
            self._aside = None  # As long as anybody has it, the connections stay open.

    @contextmanager
    def around(self, trainer: Trainer) -> Iterator[None]:
        """Save at the end of the block, also if a signal ended it, and wait for all writing."""
        try:
            yield
            self._save_last(trainer)
        except RunInterrupted:
            self._save_last(trainer)
            raise
        finally:
            self.close()

    def _save_last(self, trainer: Trainer) -> None:
        if self._plan.keep_last:
            self.save(trainer)
        self._wait(trainer)

    def _wait(self, trainer: Trainer) -> None:
        """Wait until the checkpoint before is written, on all ranks."""
        on_all(trainer.comm, self._finish_writing, "writing the checkpoint before")

    def _finish_writing(self) -> None:
        """Wait for this rank's save in the background, and raise its error if there was one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _due(self, trainer: Trainer) -> bool:
        plan, progress = self._plan, trainer.progress
        if plan.keep_last:
            waited = time.monotonic() - self._saved_at
            if plan.minutes is not None and trainer.comm.any(waited >= 60 * plan.minutes):
                return True
            by_epoch = plan.minutes is None and progress.batch == 0
            if by_epoch if plan.every is None else progress.global_step % plan.every == 0:
                return True
        return self._among_the_best(trainer)

    def _among_the_best(self, trainer: Trainer) -> bool:
        place = rank_of(self._validation(trainer) if self._plan.keep_best else None)
        if place is None:
            return False
        self._wait(trainer)  # A checkpoint that is being written counts as well.
        if not trainer.comm.is_main:  # The others have no checkpoints to compare with.
            return trainer.comm.any(False)
        beaten = rank_to_beat(self._context.folder, self._plan.keep_best)
        return trainer.comm.any(place < beaten)

    def _snapshot(self, trainer: Trainer) -> Snapshot:
        rng = trainer.rng_before_validation or checkpoint.rng_state()
        of_rank = {"rng": rng, "products": trainer.precision.state_dict()}
        with_state = {name: one for name, one in trainer.callbacks.items() if has_state(one)}
        return Snapshot(
            trainer.progress.global_step,
            {
                "trainer": trainer.state_dict(),
                "rng": of_rank["rng"],
                OTHER_RANKS: of_other_ranks(trainer.comm, of_rank),
                "callbacks": run_callbacks(with_state, "state_dict"),
                "usage": dict(self._context.usage),
            },
            self._context.config,
            {
                "validation": self._validation(trainer),
                "made_on": arithmetic(device_of(trainer.model), trainer.comm),
                "run": self._context.identity,
                "records": records_in(self._context.folder),
            },
        )

    def _write(self, trainer: Trainer, snapshot: Snapshot) -> None:
        """Write a checkpoint now, or begin to write a copy of it in the background."""
        folder, behind = self._context.folder, self._plan.background
        comm: Any = trainer.comm
        save: Callable[[], object]
        if comm.sharding is not None:
            if behind and self._aside is None:
                self._aside = comm.aside()
            save = prepare_together(folder, snapshot, self._aside or comm, copied=behind)
        elif behind:
            save = partial(checkpoint.save, folder, snapshot.to_cpu()) if comm.is_main else int
        else:
            write_one = partial(checkpoint.save, folder, snapshot) if comm.is_main else int
            save = partial(on_all, comm, write_one, f"writing checkpoint {snapshot.global_step}")

        def write() -> None:
            save()
            try:
                prune(folder, self._plan.keep_last, self._plan.keep_best)
            except OSError as error:
                log.warning("warning: an old checkpoint could not be deleted: %s", error)

        if behind:
            self._writing = self._writer.submit(write)
        else:
            write()

    def _validation(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the facts by which a checkpoint of this step ranks, if it was validated."""
        evaluation, progress = self._context.results.evaluation, trainer.progress
        if evaluation is None or progress.validated != progress.global_step:
            return None
        name, value = evaluation.monitor, evaluation.watched
        higher = evaluation.direction(name)
        if higher is None:
            if self._plan.keep_best and not self._said:
                self._said = True
                said = "warning: trainer.keep_best=%d: the best has the lowest validation loss; "
                said += "for the best %s, give that metric higher_is_better = True or False"
                log.warning(said, self._plan.keep_best, name)
            name = LOSS
        # JSON has no nan, and no value is better or worse than nan.
        number = value if math.isfinite(value) else None
        return {"metric": name, "value": number, "higher_is_better": bool(higher)}
