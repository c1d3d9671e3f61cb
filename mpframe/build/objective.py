"""The objective: that of the dataset, or the one that the configuration names instead."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mpframe.build.target import found, make, options_of
from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.errors import ConfigError
from mpframe.objectives import Objective, Supervised, require_objective


def with_objective(task: Task, config: Config) -> Task:
    """The task with the objective of the configuration; the task itself if it names none."""
    if config.objective is None:
        return task
    return replace(task, objective=build_objective(config.objective))


def build_objective(node: dict[str, Any]) -> Objective:
    """What `objective._target_` names.

    A function whose first parameters are called `model` and `batch` is the objective itself, and
    its further parameters are options. Anything else is called with its options and makes one.

    Raises:
        ConfigError: there is no such target, it does not take these options, or it is a loss.
        UserCodeError: what it makes is not an objective.
    """
    target = found("objective", node["_target_"])
    if _is_objective(target):
        options = options_of("objective", node)
        return partial(target, **options) if options else target
    made = make("objective", node)
    if isinstance(made, nn.modules.loss._Loss):
        raise ConfigError(
            f"objective._target_={node['_target_']}: is a loss; use "
            "objective._target_=mpframe.objectives.supervised "
            f"objective.loss._target_={node['_target_']}"
        )
    require_objective(f"objective._target_={node['_target_']}", made)
    return made  # type: ignore[no-any-return]


def _is_objective(target: Any) -> bool:
    if not inspect.isfunction(target):
        return False
    return list(inspect.signature(target).parameters)[:2] == ["model", "batch"]


def to_device(objective: Objective, device: torch.device) -> None:
    """Move the tensors of an objective, such as a loss's weights of classes, if it has any."""
    own = objective.loss if isinstance(objective, Supervised) else objective
    if isinstance(own, nn.Module):
        own.to(device)
