"""Builds a run from its options, or from a checkpoint that a path names, ready to be measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpframe import checkpoint
from mpframe.checkpoint.export import facts_of
from mpframe.checkpoint.folder import FOLDER, MANIFEST, best_in
from mpframe.checkpoint.state import averages_of, extra_state_of, weights_of
from mpframe.checkpoint.untrusted import raise_as_damaged
from mpframe.config.schema import Config
from mpframe.config.stored import config_of
from mpframe.core.errors import ConfigError
from mpframe.data.loading import Loader
from mpframe.data.task import Task
from mpframe.run.folder import refuse_other_preprocessing
from mpframe.run.parts import build_loaders, build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.tracking.summary import Summary
from mpframe.training.callbacks.ema import Ema, ema_of
from mpframe.training.plan import Progress
from mpframe.training.trainer import Trainer


@dataclass(frozen=True)
class Restored:
    config: Config  # changed as the command line said
    task: Task
    trainer: Trainer  # with the weights of the checkpoint
    step: int  # steps the run had tried when the checkpoint was saved
    weights: str  # `trained` or `ema`


def rebuilt(config: Config) -> tuple[Trainer, Loader]:
    """Build a run's trainer and its training data, before the first step."""
    seed_everything(config.run.seed)
    task = build_task(config)
    train = build_loaders(config, task).train
    return build_trainer(config, task, len(train)), train


def run_folder(path: Path) -> Path:
    """Return the folder of a checkpoint's run, or of the run itself."""
    inside = path.absolute().parent.name == FOLDER and (path / MANIFEST).exists()
    return path.parent.parent if inside else path


def checkpoint_of(path: Path, split: str | None = None) -> Path:
    """Return the checkpoint that was tested, if the run in `path` tested its best, or `path`."""
    if split == "val" or checkpoint.newest(path) == path:
        return path
    try:
        tested = Summary.read(path).tested
    except OSError:  # A run that is not finished may have none, and has not been tested.
        return path
    best = best_in(path, 1) if tested == "best" else []
    return best[0] if best else path


def restore_run(
    path: Path,
    given: list[str],
    weights: str | None = None,
    task_of: Callable[[Mapping[str, Any]], Task] | None = None,
) -> Restored:
    """Build the run of a checkpoint, with the options in `given` changed, and load its weights.

    `path` is a checkpoint, or a run's folder for its newest one. `weights`: `trained` or `ema`, by
    default as the run was validated. `task_of` makes the task from the checkpoint's facts
    (checkpoint/export.py), in place of the run's dataset, objective and metrics.
    """
    snapshot, source = checkpoint.read(path), checkpoint.newest(path)
    data = task_of is None
    state, config = snapshot.state, config_of(snapshot.config, source / "config.yaml", given, data)
    trained = weights_of(state, "trained", path)
    kind = weights or ("ema" if config.trainer.ema_decay is not None else "trained")
    seed_everything(config.run.seed)
    facts = facts_of(snapshot, source)
    task = task_of(facts) if task_of else build_task(config)
    if data:
        refuse_other_preprocessing(task, facts["preprocessing"], run_folder(path))
    trainer = build_trainer(config, task, 1)
    trainer.extra_state.load_state_dict(extra_state_of(state, path))
    trainer.load_weights(trained)
    if kind == "trained":
        algorithms = trainer.algorithms.items()
        trainer.algorithms = {n: a for n, a in algorithms if not isinstance(a, Ema)}
    else:
        averages, ema = averages_of(state, path), ema_of(trainer)
        if ema is None:
            hint = "trainer.ema_decay is null; give trainer.ema_decay=0.999"
            raise ConfigError(f"weights=ema: {hint}")
        ema.load_by_name(averages)
    with raise_as_damaged(path, "it holds no progress of a run"):
        step = Progress.from_state(state["trainer"]["progress"]).global_step
    return Restored(config, task, trainer, step, kind)
