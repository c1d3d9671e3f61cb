"""The dataset: its samples, loss and metrics, and the loaders that make batches of them."""

from typing import Any, NamedTuple

from mpframe.build.device import resolve_device
from mpframe.build.objective import with_objective
from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.data.loading import Loader
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
    require_workers(config.data.workers)
    size = config.data.batch_size
    train = Loader(task.train, size, shuffle=True, drop_last=True, **_common(config, task, world))
    val = evaluation_loader(config, task, task.val, "validation", world)
    if task.test is None:
        return Loaders(train, val, None)
    return Loaders(train, val, evaluation_loader(config, task, task.test, "test", world))


def evaluation_loader(
    config: Config, task: Task, samples: Any, split: str, world: World = ALONE
) -> Loader:
    """The loader of samples that are measured or predicted, in their order."""
    size, option = config.data.batch_size, "dataset.batch_size"
    if config.data.eval_batch_size is not None:
        size, option = config.data.eval_batch_size, "dataset.eval_batch_size"
    common = _common(config, task, world)
    return Loader(samples, size, shuffle=False, split=split, option=option, **common)


def _common(config: Config, task: Task, world: World) -> dict[str, Any]:
    return {
        "seed": config.run.seed,
        "workers": config.data.workers,
        "worker_timeout": config.data.worker_timeout,
        "collate": task.collate,
        "pin": resolve_device(config.run.device).type == "cuda",
        "world": world,
    }
