"""The dataset: its samples, loss and metrics, and the loaders that make batches of them."""

from typing import Any, NamedTuple

from mpframe.build.device import resolve_device
from mpframe.build.objective import with_objective
from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.data.loader import Loader
from mpframe.data.task import Task
from mpframe.data.workers import require_workers
from mpframe.distributed.world import ALONE, World
from mpframe.errors import ConfigError


def build_task(config: Config) -> Task:
    """The dataset's task, with the objective of the configuration if that names one."""
    task = make("dataset", config.dataset)
    if not isinstance(task, Task):
        raise ConfigError(
            f"dataset._target_={config.dataset['_target_']}: must return a mpframe.data.Task, "
            f"got {type(task).__name__}"
        )
    return with_objective(task, config)


class Loaders(NamedTuple):
    """The loaders of a task's parts; `test` is None if it has none."""

    train: Loader
    val: Loader
    test: Loader | None


def build_loaders(config: Config, task: Task, world: World = ALONE) -> Loaders:
    """The loaders: training data shuffled and in whole batches only, the others as they are.

    Args:
        config: the options.
        task: the dataset.
        world: the ranks that share each batch.
    """
    data = config.data
    require_workers(data.workers)
    common: dict[str, Any] = {
        "seed": config.run.seed,
        "workers": data.workers,
        "worker_timeout": data.worker_timeout,
        "collate": task.collate,
        "pin": resolve_device(config.run.device).type == "cuda",
        "world": world,
    }
    train = Loader(task.train, data.batch_size, shuffle=True, drop_last=True, **common)
    val = Loader(task.val, data.batch_size, shuffle=False, split="validation", **common)
    if task.test is None:
        return Loaders(train, val, None)
    test = Loader(task.test, data.batch_size, shuffle=False, split="test", **common)
    return Loaders(train, val, test)
