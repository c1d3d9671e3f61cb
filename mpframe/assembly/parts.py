"""The parts of a run, each made from its options.

Model, data, objective, metrics, precision, loss scaler, callbacks, and the device. What is made is
checked, so that a user's own class that does not fit is refused before the first step.
"""

import inspect
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpframe.assembly.target import found, make, options_of
from mpframe.config.schema import Config
from mpframe.core.callback import Algorithm, Callback
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, UserCodeError, nearest
from mpframe.core.loss_scaling.scaler import LossScaler, NoScaling, Scaling
from mpframe.core.loss_scaling.scaler import name_of as name_of_scaler
from mpframe.core.masters import Master
from mpframe.core.objective import Objective, Supervised, require_objective
from mpframe.core.op_lists import PINS, OpLists
from mpframe.core.policy import NO_PRODUCTS
from mpframe.core.precision import Precision
from mpframe.core.user_code import UserCode, described, name_of
from mpframe.data.loading import Loader
from mpframe.data.task import Task
from mpframe.data.workers import require_workers
from mpframe.parallel.launch import place
from mpframe.training.evaluation import LOSS, NamedMetric


def build_model(config: Config) -> nn.Module:
    model = make("model", config.model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={config.model['_target_']}: must return a torch.nn.Module, got "
            f"{type(model).__name__}"
        )
    _refuse_untrainable(model)
    return model


def _refuse_untrainable(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    empty = next((name for name, weight in weights.items() if weight.is_meta), None)
    if empty is not None:
        raise UserCodeError(
            f"model: {name_of(model)} has {empty} on the meta device, where weights have no "
            "values; build it on the CPU"
        )
    if not any(weight.requires_grad for weight in weights.values()):
        raise UserCodeError(
            f"model: {name_of(model)} has no weight to train ({len(weights)} are frozen); leave "
            "requires_grad to some"
        )


def seed_everything(seed: int) -> None:
    """Seed every generator that weights, dropout or a user's own code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def resolve_device(name: str) -> torch.device:
    """The device an option names; `auto` takes CUDA, then MPS, then the CPU.

    Of several ranks each has a CUDA device of its own, that of its number on this machine.
    """
    if place().size > 1:
        return _of_this_rank(name)
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdigit())):
        hint = nearest(name, ["auto", "cpu", "cuda", "mps"])
        raise ConfigError(
            f"device={name}: choose auto, cpu, cuda, cuda:N or mps" + f"; {hint}" * bool(hint)
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices; "
            "use device=cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine has no MPS device; use device=cpu")
    return torch.device(name)


def _of_this_rank(name: str) -> torch.device:
    rank, devices = place().local_rank, torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device={name}: each rank takes a device of its own; choose auto, cpu or cuda"
        )
    if name == "cpu" or (name == "auto" and not devices):
        return torch.device("cpu")
    if rank >= devices:
        fewer = f"start torchrun with --nproc-per-node {devices}, or " * bool(devices)
        raise ConfigError(
            f"device={name}: this machine has {devices} CUDA devices and more ranks; {fewer}use "
            "device=cpu"
        )
    return torch.device("cuda", rank)


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
            "objective._target_=mpframe.core.objective.supervised "
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


def build_task(config: Config) -> Task:
    """The dataset's task, with the objective of the configuration if that names one."""
    task = make("dataset", config.dataset)
    if not isinstance(task, Task):
        raise ConfigError(
            f"dataset._target_={config.dataset['_target_']}: must return a mpframe.data.Task, "
            f"got {type(task).__name__}"
        )
    if config.objective is None:
        return task
    return replace(task, objective=build_objective(config.objective))


class Loaders(NamedTuple):
    """The loaders of a task's parts; `test` is None if it has none."""

    train: Loader
    val: Loader
    test: Loader | None


def build_loaders(config: Config, task: Task, comm: Comm = SINGLE_PROCESS) -> Loaders:
    """The loaders: training data shuffled and in whole batches only, the others as they are."""
    require_workers(config.data.workers)
    size = config.data.batch_size
    train = Loader(task.train, size, shuffle=True, drop_last=True, **_common(config, task, comm))
    val = evaluation_loader(config, task, task.val, "validation", comm)
    if task.test is None:
        return Loaders(train, val, None)
    return Loaders(train, val, evaluation_loader(config, task, task.test, "test", comm))


def evaluation_loader(
    config: Config, task: Task, samples: Any, split: str, comm: Comm = SINGLE_PROCESS
) -> Loader:
    """The loader of samples that are measured or predicted, in their order."""
    size, option = config.data.batch_size, "dataset.batch_size"
    if config.data.eval_batch_size is not None:
        size, option = config.data.eval_batch_size, "dataset.eval_batch_size"
    common = _common(config, task, comm)
    return Loader(samples, size, shuffle=False, split=split, option=option, **common)


def _common(config: Config, task: Task, comm: Comm) -> dict[str, Any]:
    return {
        "seed": config.run.seed,
        "workers": config.data.workers,
        "worker_timeout": config.trainer.timeout,
        "collate": task.collate,
        "pin": resolve_device(config.run.device).type == "cuda",
        "comm": comm,
    }


def build_metrics(config: Config, task: Task) -> dict[str, Any]:
    """What makes each metric, by name, the dataset's first; one of the group may replace it."""
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


def build_precision(config: Config) -> Precision:
    """The dtype mode with its op lists."""
    dtype, ops = config.dtype, config.ops
    lists = OpLists.from_mapping(
        {
            "allow": ops.allow,
            "deny": ops.deny,
            "infer": ops.infer,
            "move": ops.move,
            "modules": ops.modules,
        }
    )
    recipes = {}
    if dtype.recipes or {dtype.products, *lists.modules.values()} - {*PINS, NO_PRODUCTS}:
        made = import_module("mpframe.lowbit.recipe").Recipe.from_mapping
        recipes = {name: made(name, node) for name, node in dtype.recipes.items()}
    return Precision(
        dtype.mode,
        dtype.half,
        ops=lists,
        compute=dtype.compute,
        master_weights=_masters(str(dtype.master_weights)),
        products=dtype.products,
        recipes=recipes,
    )


def _masters(word: str) -> bool | type[Master]:
    if word == "split":
        from mpframe.training.split_master import SplitMaster

        return SplitMaster
    return word == "on"


def in_fp32(config: Config) -> Config:
    """The same options in fp32, where neither lists nor pins cast anything."""
    return replace(config, dtype=replace(config.dtype, mode="fp32", products="none"))


_METHODS = ("update", "to", "state_dict", "load_state_dict")
_PAGE = "docs/loss_scaling.md"


def build_scaler(config: Config) -> LossScaler:
    """The loss scaler that `loss_scaling._target_` makes; `NoScaling` if the loss is not scaled."""
    scaler: LossScaler = make("loss_scaling", config.loss_scaling) or NoScaling()
    _refuse_unfit(f"loss_scaling._target_={config.loss_scaling['_target_']}", scaler)
    return scaler


def _refuse_unfit(option: str, scaler: LossScaler) -> None:
    methods = [name for name in _METHODS if not callable(getattr(scaler, name, None))]
    missing = [*methods, *([] if hasattr(scaler, "scale") else ["scale"])]
    if missing:
        raise ConfigError(f"{option}: has no {' and no '.join(missing)}; see {_PAGE}")
    scale = scaler.scale
    if not isinstance(scale, Tensor) or scale.dim() or scale.dtype != torch.float32:
        raise ConfigError(
            f"{option}: its scale is {described(scale)}; must be a 0-d float32 tensor; see {_PAGE}"
        )


def scaling_name(config: Config) -> str:
    """What the loss scaling is called: `static`, `Backoff`, `LogMax`, `none`, or a user's class."""
    return name_of_scaler(build_scaler(config))


def build_scalers(config: Config, task: Task, device: torch.device) -> Scaling:
    """One scaler, or one for each loss."""
    scaler = build_scaler(config).to(device)
    each = config.joint is not None and config.joint.scalers == "each"
    if not each or isinstance(scaler, NoScaling):
        return scaler
    return {name: build_scaler(config).to(device) for name in task.objectives}


def build_callbacks(config: Config, *, algorithms: bool = False) -> dict[str, Callback]:
    """Make the group's callbacks in their order: those that are an `Algorithm`, or the others."""
    nodes = {
        name: node
        for name, node in config.callbacks.items()
        if _is_algorithm(found(f"callbacks.{name}", node["_target_"])) is algorithms
    }
    callbacks = {name: make(f"callbacks.{name}", node) for name, node in nodes.items()}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks.{name}._target_={nodes[name]['_target_']}: must return a "
                f"mpframe.core.callback.Callback, got {type(callback).__name__}"
            )
    return callbacks


def _is_algorithm(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, Algorithm)
