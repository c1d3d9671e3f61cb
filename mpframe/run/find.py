"""`trainer.find`: measures an option before the training, in place of it.

`lr` leaves a picture in the run's folder and in TensorBoard. Neither trains: the run ends with zero
steps and a line that says what to type, which is also the reason in `summary.json`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from mpframe.config.schema import Config, Part
from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.data.loading import Loader
from mpframe.data.task import Task
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


def find(config: Config, trainer: Trainer, task: Task, train: Loader, folder: Path) -> str:
    """Measure what `trainer.find` names, and return the line that says the result.

    ConfigError: it goes on from a checkpoint, or there are several ranks, or it cannot be measured.
    """
    option = f"trainer.find={config.trainer.find}"
    if config.run.resume != "none":
        raise ConfigError(
            f"{option}: measures before the first step, and resume={config.run.resume} goes on "
            "from a later one; use resume=none, or init_from for the weights of a run"
        )
    if trainer.comm.size > 1:
        raise ConfigError(
            f"{option}: measures in one process, and there are {trainer.comm.size}; start it "
            "without torchrun"
        )
    if config.trainer.find == "batch_size":
        return f"{option}: {_find_batch_size(config, trainer, task)}"
    return f"{option}: {_find_lr(config, trainer, train, folder)}"


def _find_lr(config: Config, trainer: Trainer, train: Loader, folder: Path) -> str:
    from mpframe.lab.find_lr import draw_range_test, find_lr  # only if asked

    rates = lr_options(config)
    option, present = next(iter(rates.items()))
    test, path = find_lr(trainer, train, lr=present), folder / "find_lr.png"
    draw_range_test(test, option, path)
    with Tracker(folder, 1) as tracker:
        tracker.image(Tag.FIND_LR, path.read_bytes(), 0)
    lr, seen = test.suggestion, f"({test.describe()}; see {path})"
    if lr is None:
        return f"no learning rate made the loss fall by more than its noise {seen}"
    words = [f"{name}={rate * lr / present:.2g}" for name, rate in rates.items()]
    return f"{' '.join(words)} {seen}"


def _find_batch_size(config: Config, trainer: Trainer, task: Task) -> str:
    from mpframe.lab.find_batch_size import find_batch_size  # only if asked

    def load(size: int) -> Batch:
        seed, collate = config.run.seed, task.collate
        return next(Loader(task.train, size, seed=seed, shuffle=True, collate=collate).epoch(0))

    most = Loader(task.train, 1, shuffle=False).size
    search = find_batch_size(trainer, load, config.data.batch_size, most)
    return search.describe()


def lr_options(config: Config) -> dict[str, float]:
    """Return the learning rates as numbers by option. A group's factor follows `optimizer.lr`."""
    node, parts = config.optimizer, config.joint.parts if config.joint else {}
    rates = {"optimizer.lr": node.get("lr")} if not parts else {}
    rates |= _rates("optimizer.parts", parts) | _rates("optimizer.groups", config.groups)
    numbers = {name: float(rate) for name, rate in rates.items() if isinstance(rate, float | int)}
    if not numbers:
        raise ConfigError("trainer.find=lr: no optimizer.lr is set; give it a first value")
    return numbers


def _rates(path: str, parts: Mapping[str, Part]) -> dict[str, float | str | None]:
    return {f"{path}.{name}.lr": part.options.lr for name, part in parts.items()}
