"""A trainer made in Python, trained in a folder with what every run has."""

from pathlib import Path

from mpframe.checkpoint.folder import set_aside_after, tidy
from mpframe.config.schema import TrainerOptions
from mpframe.data.loading import Loader
from mpframe.files.durable import refuse_unwritable
from mpframe.files.file_lock import run_lock
from mpframe.run.folder import refuse_unfit, unwritable_in_one_line
from mpframe.run.parts import RunCallbacks
from mpframe.run.resume import resume_from
from mpframe.tracking.logger import Loggers
from mpframe.tracking.tracker import Tracker
from mpframe.training.callbacks.checkpoints import SavePlan
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.interruption import Interruption
from mpframe.training.results import Throughput
from mpframe.training.run_context import RunContext, set_up
from mpframe.training.trainer import Trainer


def fit(
    trainer: Trainer,
    train: Loader,
    val: Loader | None = None,
    *,
    folder: str | Path,
    resume: str = "none",
    save: SavePlan | None = None,
) -> RunContext:
    """Train as planned in `folder`, with its callbacks, checkpoints, and TensorBoard.

    `resume` is as on the command line: none, auto, or a folder. A signal ends the run after a step,
    and saves it. Return the run's parts, of which `results` has the last validation and the best.

    MpframeError: the folder cannot be used, or the run could not start or continue.
    """
    path, own, interruption = Path(folder), trainer.callbacks, Interruption()
    refuse_unwritable("folder", path)
    refuse_unfit(path, resume, "folder")
    path.mkdir(parents=True, exist_ok=True)
    guard, speed = SkipGuard(TrainerOptions().max_consecutive_skips), Throughput(train.batch_size)
    fixed = RunCallbacks(own, speed, guard, save or SavePlan(), interruption, train)
    trainer.callbacks = fixed.by_name
    try:
        with unwritable_in_one_line(path), run_lock(path), interruption, interruption.defer():
            tidy(path)
            identity = resume_from(trainer, resume, path, "")
            set_aside_after(path, trainer.progress.global_step)
            with Loggers(Tracker(path, max(1, trainer.progress.global_step))) as tracker:
                context = RunContext(path, "", identity, tracker, train, speed, fixed.results)
                with set_up(trainer, context), fixed.checkpoints.around(trainer):
                    trainer.fit(train, val)
    finally:
        trainer.callbacks = own
    return context
