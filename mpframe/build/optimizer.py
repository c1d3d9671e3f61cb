"""Optimizers, learning-rate schedules and the average of the weights."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpframe.build.metrics import monitored
from mpframe.build.target import found, make
from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.errors import ConfigError
from mpframe.optim import MasterWeights, MultiOptimizer
from mpframe.optim.ema import Ema
from mpframe.optim.optimizer_parts import Selection, divided
from mpframe.training.trainer import AnyOptimizer


def build_optimizers(config: Config, model: nn.Module) -> dict[str, Optimizer]:
    """The optimizers by name; the only one is named ""."""
    if config.joint is None:
        return {"": _optimizer("optimizer", config.optimizer, model.parameters())}
    selections = {
        name: Selection(part.options.parameters, part.options.without, part.options.ndim)
        for name, part in config.joint.parts.items()
    }
    parameters = divided(model, selections)
    return {
        name: _optimizer(f"optimizer.parts.{name}", part.node, parameters[name])
        for name, part in config.joint.parts.items()
    }


def _optimizer(path: str, node: dict[str, Any], parameters: Any) -> Optimizer:
    optimizer = make(path, node, parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{path}._target_={node['_target_']}: must return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def joined(config: Config, masters: dict[str, MasterWeights], task: Task) -> AnyOptimizer:
    """One optimizer over all; the only one is itself."""
    if config.joint is not None:
        several = isinstance(task.objective, Mapping)
        return MultiOptimizer(masters, skip=config.joint.skip, own_losses=several)
    return masters[""]


def build_schedule(
    config: Config, optimizer: Optimizer, total_steps: int, metrics: Mapping[str, Any]
) -> LRScheduler | None:
    if config.scheduler is None:
        return None
    node = dict(config.scheduler)
    target = found("scheduler", node["_target_"])
    if "total_steps" in inspect.signature(target).parameters:
        node.setdefault("total_steps", total_steps)
    if isinstance(target, type) and issubclass(target, ReduceLROnPlateau):
        _set_direction(node, *monitored(metrics, config.trainer.monitor))
    return make("scheduler", node, optimizer)  # type: ignore[no-any-return]


def _set_direction(node: dict[str, Any], name: str, higher: bool | None) -> None:
    """Let a schedule that watches validation look for the better values of what is monitored.

    Raises:
        ConfigError: it was told to look for the worse ones.
    """
    watched = "val_loss" if higher is None else f"val_{name}"
    mode = "max" if higher else "min"
    if node.setdefault("mode", mode) != mode:
        raise ConfigError(
            f"scheduler.mode={node['mode']}: the schedule watches {watched}, where "
            f"{'more' if higher else 'less'} is better; use scheduler.mode={mode}"
        )


def build_ema(config: Config, model: nn.Module, optimizer: AnyOptimizer) -> Ema | None:
    decay = config.trainer.ema_decay
    if decay is None:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    return Ema({p: optimizer.master_of(p) for p in trained}, decay)
