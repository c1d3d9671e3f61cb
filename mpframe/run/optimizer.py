"""Optimizers and learning-rate schedules."""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from mpframe.config.check import flatten
from mpframe.config.planned import fill_in
from mpframe.config.redaction import hide, secrets_of
from mpframe.config.schema import Config, GroupOptions, Part, parse_measure
from mpframe.core.errors import ConfigError
from mpframe.run.target import find_target, make, make_a, parameters_of, require_methods
from mpframe.training.callbacks.schedules import Numbers, PlannedSchedule, Schedule
from mpframe.training.evaluation import LOSS, NamedMetric
from mpframe.training.optimizers.selection import Selection, divide_parameters, group_parameters
from mpframe.training.plan import Progress

log = logging.getLogger(__name__)


def build_optimizers(config: Config, model: nn.Module) -> dict[str, Optimizer]:
    """Make the optimizers by name, an only one with the name ""."""
    if config.joint is None:
        parameters = _build_groups(config, model) if config.groups else model.parameters()
        return {"": make_a(Optimizer, "optimizer", config.optimizer, parameters)}
    parts = config.joint.parts
    of_part = divide_parameters(
        model, {name: _selection(part.options) for name, part in parts.items()}
    )
    return {
        name: make_a(Optimizer, f"optimizer.parts.{name}", part.node, of_part[name])
        for name, part in parts.items()
    }


def _selection(options: GroupOptions) -> Selection:
    return Selection(options.parameters, options.without, options.ndim)


def _build_groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """Return torch's parameter groups, each with its name and settings, without frozen ones."""
    selections = {name: _selection(group.options) for name, group in config.groups.items()}
    selected = group_parameters(model, selections)
    groups = []
    for name, parameters in selected.items():
        group = config.groups.get(name)
        settings = {} if group is None else _settings(config, name, group, parameters)
        frozen = group is not None and group.options.frozen
        shown = ["frozen"] if frozen else [f"{key} {value}" for key, value in settings.items()]
        values = sum(parameter.numel() for parameter in parameters)
        size = f"{name}: {len(parameters)} tensors of {values:,} values"
        log.info("optimizer group %s", ", ".join([size, *shown]))
        if frozen:
            for parameter in parameters:
                parameter.requires_grad_(False)
        else:
            groups.append({"params": parameters, "name": name, **settings})
    if not groups:
        raise ConfigError("optimizer.groups: every parameter is frozen; leave some to train")
    return groups


def _settings(
    config: Config, name: str, group: Part, parameters: list[nn.Parameter]
) -> dict[str, Any]:
    """Return the group's settings, checked by making an optimizer: torch takes any from a group."""
    path, settings, lr = f"optimizer.groups.{name}", dict(group.node), group.options.lr
    factor = parse_measure(lr, "x")
    if factor is not None and "lr" not in config.optimizer:
        raise ConfigError(f"{path}.lr={lr}: is a factor on optimizer.lr; set that as well")
    if lr is not None:
        settings["lr"] = lr if factor is None else config.optimizer["lr"] * factor
    if not settings:
        return {}
    made = make_a(Optimizer, path, {**config.optimizer, **settings}, parameters)
    for key in settings:
        if key not in made.defaults:
            raise ConfigError(
                f"{path}.{key}={settings[key]}: is the same for all parameters; a group may "
                f"set {', '.join(made.defaults)}"
            )
    return settings


def build_schedule(
    config: Config,
    optimizer: Optimizer,
    plan: Callable[[Progress], Numbers],
    metrics: Mapping[str, Any],
) -> Schedule | None:
    """Make the schedule, if there is one, for a run whose plan from any progress on is given."""
    if config.scheduler is None:
        return None
    target = find_target("scheduler", config.scheduler["_target_"])
    if not (isinstance(target, type) and issubclass(target, ReduceLROnPlateau)):
        return PlannedSchedule(partial(_for_numbers, config.scheduler, optimizer), optimizer, plan)
    node = fill_in(config.scheduler, plan(Progress()))
    _set_direction(node, metrics, config.trainer.monitor)
    return _schedule(node, optimizer)  # type: ignore[no-any-return]


def _for_numbers(
    node: dict[str, Any], optimizer: Optimizer, numbers: Numbers
) -> tuple[Any, dict[str, str]]:
    """Make a schedule for a plan, and return it with its arguments, which a checkpoint holds."""
    node = fill_in(node, numbers)
    if "total_steps" in (parameters_of("scheduler", node["_target_"]) or {}):
        node.setdefault("total_steps", numbers["total_steps"])
    schedule, steps = _schedule(node, optimizer), numbers["total_steps"]
    if isinstance(schedule, OneCycleLR) and schedule.total_steps < steps:
        raise ConfigError(
            f"scheduler.total_steps={schedule.total_steps}: OneCycleLR cannot go on after it, and "
            f"the run is planned for {steps} steps; leave it out, or set trainer.epochs or "
            "trainer.max_steps to fit it"
        )
    secrets = secrets_of(sys.argv)
    return schedule, {name: hide(str(value), secrets) for name, value in flatten(node).items()}


def _schedule(node: dict[str, Any], optimizer: Optimizer) -> Any:
    schedule = make("scheduler", node, optimizer)
    option, page = f"scheduler._target_={node['_target_']}", "docs/optimizer.md"
    require_methods(option, schedule, ("step", "state_dict", "load_state_dict"), page)
    return schedule


def _set_direction(node: dict[str, Any], metrics: Mapping[str, Any], monitor: str | None) -> None:
    """Set the direction of a schedule that watches validation to the monitored value's."""
    name = next(iter(metrics), LOSS) if monitor is None else monitor
    higher = False if name == LOSS else NamedMetric(name, metrics[name]).higher_is_better
    watched = "val_loss" if higher is None else f"val_{name}"
    mode = "max" if higher else "min"
    if node.setdefault("mode", mode) != mode:
        raise ConfigError(
            f"scheduler.mode={node['mode']}: the schedule watches {watched}, where "
            f"{'more' if higher else 'less'} is better; use scheduler.mode={mode}"
        )
