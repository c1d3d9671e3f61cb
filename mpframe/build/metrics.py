"""The metrics of a validation: the dataset's own, and those of the group `metrics`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.errors import ConfigError, UserCodeError, nearest
from mpframe.training.evaluation import LOSS, NamedMetric
from mpframe.user_code import UserCode, name_of


def build_metrics(config: Config, task: Task) -> dict[str, Any]:
    """What makes each metric, by name, the dataset's first; one of the group may replace it.

    Raises:
        ConfigError: a metric is named loss, or `trainer.monitor` names no metric.
        UserCodeError: a metric cannot be made, is not a metric, or has no name.
    """
    group = {name: partial(make, f"metrics.{name}", node) for name, node in config.metrics.items()}
    metrics = {**_of_dataset(task), **group}
    if LOSS in metrics:
        option = (
            "metrics.loss" if LOSS in group else f"dataset._target_={config.dataset['_target_']}"
        )
        raise ConfigError(
            f"{option}: its metric is named loss, and val_loss is the validation loss; give the "
            "metric another name"
        )
    for name, code in metrics.items():
        NamedMetric(
            name, code
        )  # Each is made once before the first step, so that an error is told at once.
    _require_monitored(config.trainer.monitor, metrics)
    return metrics


def monitored(metrics: Mapping[str, Any], monitor: str | None) -> tuple[str, bool | None]:
    """The name of what is monitored, and whether more of it is better; None if it does not tell."""
    name = next(iter(metrics), LOSS) if monitor is None else monitor
    return name, False if name == LOSS else NamedMetric(name, metrics[name]).higher_is_better


def _of_dataset(task: Task) -> dict[str, Any]:
    if task.metric is None or isinstance(task.metric, Mapping):
        return dict(task.metric or {})
    with UserCode("dataset: the metric", task.metric):
        name = getattr(task.metric(), "name", None)
    if not isinstance(name, str) or not name:
        raise UserCodeError(
            f"dataset: the metric {name_of(task.metric)} has {name!r} for a name; it must be a "
            "word, as in name = 'accuracy'"
        )
    return {name: task.metric}


def _require_monitored(monitor: str | None, metrics: Mapping[str, Any]) -> None:
    known = [*metrics, LOSS]
    if monitor is not None and monitor not in known:
        raise ConfigError(
            f"trainer.monitor={monitor}: no such metric; choose {', '.join(known)}"
            + (f"; {hint}" if (hint := nearest(monitor, known)) else "")
        )
