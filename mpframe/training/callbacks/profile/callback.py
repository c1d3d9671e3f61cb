"""Records a few steps of a run, and says what they cost."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack

from torch.profiler import profile, schedule

from mpframe.tracking.tags import Tag
from mpframe.training.callback import Callback
from mpframe.training.callbacks.profile.modules import marked
from mpframe.training.callbacks.profile.table import Costs
from mpframe.training.callbacks.profile.trace import read_ops
from mpframe.training.loader import Batch
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

FOLDER = "profile"
_BEFORE, _WARM_UP, _RECORDED = 5, 1, 3  # steps


class Profile(Callback):
    """Records three steps with torch.profiler, from the seventh step of this start of the run on.

    The trace goes into the run's folder, the largest costs by module and format into the log and
    into TensorBoard's text. A validation in between ends the recording. A compiled model has no
    modules to attribute costs to: it counts as one.
    """

    _context: RunContext

    def __init__(self) -> None:
        self._pending = True
        self._profiler: profile | None = None
        self._around = ExitStack()
        self._first_step = self._began_at = self._recorded = 0

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Take the folder for the trace; note where this start of the run begins."""
        self._context = context
        self._first_step = trainer.progress.global_step + _BEFORE

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Begin before the first step that is due."""
        if self._pending and trainer.progress.global_step >= self._first_step:
            self._pending, self._recorded = False, 0
            self._began_at = trainer.progress.global_step
            self._begin(trainer)

    def on_prediction_step(self, trainer: Trainer) -> None:
        """End before the validation of a step, which is no part of what the step costs."""
        self._recorded += 1
        self._end()

    def on_step_end(self, trainer: Trainer) -> None:
        """Go on to the next step, or end after the last one."""
        if self._profiler is None:
            return
        trainer.read_verdicts()  # What the device still computes belongs to this step.
        self._recorded += 1
        if self._recorded == _WARM_UP + _RECORDED:
            self._end()
        else:
            self._profiler.step()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """End with the run, and say so if that was too short."""
        self._end(save=error is None)
        if self._pending and error is None:
            log.warning(
                "warning: trainer.profile=true: the run ended before step %d, where the profile "
                "begins; take more steps",
                self._first_step + 1,
            )

    def _begin(self, trainer: Trainer) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # It reports each start on stderr.
        if not trainer.plan.compile:
            self._around.enter_context(marked(trainer.model))
        self._profiler = profile(
            schedule=schedule(wait=0, warmup=_WARM_UP, active=_RECORDED + 1, repeat=1),
            record_shapes=True,
        )
        self._profiler.start()

    def _end(self, save: bool = True) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._around.close()
        steps = self._recorded - _WARM_UP
        if steps < 1 or not save:
            self._pending = save  # No step is recorded yet: it begins again after the validation.
            return
        try:
            self._save(profiler, steps)
        except OSError as error:
            log.warning("warning: the profile cannot be written: %s", error)

    def _save(self, profiler: profile, steps: int) -> None:
        first = self._began_at + _WARM_UP + 1
        folder = self._context.folder / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"step_{first:08d}.pt.trace.json.gz"
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)  # A link that was placed there is not followed.
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
        costs = Costs(read_ops(path), steps)
        title = (
            f"profile of steps {first} to {first + steps - 1}: {costs.milliseconds:.3g} ms a step"
        )
        log.info("%s\n%s\ntrace: %s", title, costs.text(), path)
        self._context.tracker.text(Tag.TEXT_PROFILE, f"{title}\n\n{costs.markdown()}")
