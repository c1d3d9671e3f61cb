"""The parts of a run, each made from its options and checked.

Model, data, objective, metrics, precision, loss scaler, callbacks, and the device. A user's class
that does not fit is refused before the first step.
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

from mpframe.config.schema import Config, parse_measure
from mpframe.core.callback import Algorithm, Callback
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.loss_scaling.scaler import LossScaler, NoScaling, Scaling
from mpframe.core.objective import Objective, Supervised, require_objective
from mpframe.core.user_code import describe, name_of, user_code
from mpframe.data.loading import Loader
from mpframe.data.task import Task, make_loader, training_loader
from mpframe.precision.op_lists import OpLists
from mpframe.precision.precision import Precision
from mpframe.run.target import find_target, make, make_a, options_of, require_methods
from mpframe.training.callbacks.checkpoints import Checkpoints, SavePlan
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.evaluation import LOSS, NamedMetric
from mpframe.training.interruption import Interruption
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.place import place
from mpframe.training.results import Results, Throughput
from mpframe.training.trainer import Callbacks


def build_model(config: Config) -> nn.Module:
    """Make the model, and refuse one without weights to train or with weights on `meta`."""
    model = make_a(nn.Module, "model", config.model)
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
    return model


def build_layout(config: Config) -> Layout:
    """Make the layout, and refuse one that nothing is divided by."""
    node = config.distributed
    layout = Layout() if node is None else make_a(Layout, "distributed", node)
    for name, value in vars(layout).items():
        if config.trainer.parallel != "fsdp" and value != getattr(Layout(), name):
            raise ConfigError(
                f"distributed.{name}={value}: only works with trainer.parallel=fsdp; give both"
            )
    return layout


def seed_everything(seed: int) -> None:
    """Seed every generator that weights, dropout or a user's code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def resolve_device(name: str) -> torch.device:
    """Return the device an option names, for `auto` CUDA, MPS or the CPU, in this order.

    With several ranks, each uses `cuda:LOCAL_RANK`.
    """
    if place().size > 1:
        return _of_this_rank(name)
    if name == "cpu":  # torch may warn where it looks for other devices.
        return torch.device("cpu")
    devices, mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    there = ["cuda"] * bool(devices) + ["mps"] * mps + ["cpu"]
    if name == "auto":
        return torch.device(there[0])
    there += ["auto", *(f"cuda:{number}" for number in range(devices))]
    if name not in there:
        raise ConfigError(f"device={name}: this machine has none; choose {', '.join(there)}")
    return torch.device(name)


def _of_this_rank(name: str) -> torch.device:
    rank, devices = place().local_rank, torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device={name}: each rank takes its own device; choose auto, cpu or cuda"
        )
    if name == "cpu" or (name == "auto" and not devices):
        return torch.device("cpu")
    if rank >= devices:
        raise ConfigError(
            f"device={name}: this machine has {devices} CUDA devices and more ranks; start fewer, "
            "or use device=cpu"
        )
    return torch.device("cuda", rank)


def build_objective(node: dict[str, Any]) -> Objective:
    """Return the objective that `objective._target_` names or makes.

    A function whose first parameters are called `model` and `batch` is the objective, and its other
    parameters are options. Anything else is called with its options, and must return one.

    ConfigError: there is no such target, it does not take these options, or it is a loss.
    UserCodeError: the result is not an objective.
    """
    target = find_target("objective", node["_target_"])
    names = list(inspect.signature(target).parameters) if inspect.isfunction(target) else []
    if names[:2] == ["model", "batch"]:
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


def to_device(objective: Objective, device: torch.device) -> None:
    """Move the tensors of an objective, such as a loss's class weights, if it has any."""
    module = objective.loss if isinstance(objective, Supervised) else objective
    if isinstance(module, nn.Module):
        module.to(device)


def build_task(config: Config) -> Task:
    """Make the dataset's task, with the objective of the configuration if that names one."""
    task = make_a(Task, "dataset", config.dataset)
    if config.objective is None:
        return task
    return replace(task, objective=build_objective(config.objective))


class Loaders(NamedTuple):
    """The loaders of a task's parts."""

    train: Loader
    val: Loader
    test: Loader | None


def build_loaders(config: Config, task: Task, comm: Comm = SINGLE_PROCESS) -> Loaders:
    """Make the loaders: training data shuffled and in whole batches only, the others in order."""
    options = _in_processes(config, comm)
    train = training_loader(task, config.data.batch_size, config.run.seed, **options)
    if config.run.resume != "none":
        train.require_resumable(f"resume={config.run.resume}")
    val, test = evaluation_loader(config, task, task.val, "validation", comm), None
    if task.test is not None:
        test = evaluation_loader(config, task, task.test, "test", comm)
    return Loaders(train, val, test)


def evaluation_loader(
    config: Config, task: Task, samples: Any, split: str, comm: Comm = SINGLE_PROCESS
) -> Loader:
    """Make the loader of samples that are measured or predicted, in their order."""
    size, option = config.data.batch_size, "dataset.batch_size"
    if config.data.eval_batch_size is not None:
        size, option = config.data.eval_batch_size, "dataset.eval_batch_size"
    options = {"split": split, "option": option, **_in_processes(config, comm)}
    seed, collate = config.run.seed, task.collate
    return make_loader(samples, size, shuffle=False, seed=seed, collate=collate, **options)


def _in_processes(config: Config, comm: Comm) -> dict[str, Any]:
    return {
        "workers": config.data.workers,
        "worker_timeout": config.trainer.timeout,
        "pin": resolve_device(config.run.device).type == "cuda",
        "comm": comm,
    }


def build_metrics(config: Config, task: Task) -> dict[str, Any]:
    """Return what makes each metric, by name: the dataset's, then the group's.

    A metric of the group replaces the dataset's metric of that name.
    """
    group = {name: partial(make, f"metrics.{name}", node) for name, node in config.metrics.items()}
    metrics = {**_of_dataset(task), **group}
    if LOSS in metrics:
        dataset = f"dataset._target_={config.dataset['_target_']}"
        raise ConfigError(
            f"{'metrics.loss' if LOSS in group else dataset}: its metric is named loss, and "
            "val_loss is the validation loss; give the metric another name"
        )
    for name, code in metrics.items():
        NamedMetric(name, code)  # An error is reported now, not at the first validation.
    monitor, known = config.trainer.monitor, [*metrics, LOSS]
    if monitor is not None and monitor not in known:
        raise ConfigError(f"trainer.monitor={monitor}: no such metric; choose {', '.join(known)}")
    return metrics


def _of_dataset(task: Task) -> dict[str, Any]:
    if task.metric is None or isinstance(task.metric, Mapping):
        return dict(task.metric or {})
    with user_code("dataset: the metric", task.metric):
        name = getattr(task.metric(), "name", None)
    if not isinstance(name, str) or not name:
        raise UserCodeError(
            f"dataset: the metric {name_of(task.metric)} has the name {name!r}; it must be a "
            "word, as in name = 'accuracy'"
        )
    return {name: task.metric}


def build_precision(config: Config) -> Precision:
    """Make the dtype mode with its op lists."""
    dtype = config.dtype
    lists = OpLists.from_mapping(vars(config.ops))
    recipes = {}
    if dtype.recipes:
        made = import_module("mpframe.precision.lowbit.recipe").Recipe.from_mapping
        recipes = {name: made(name, node) for name, node in dtype.recipes.items()}
    return Precision(
        dtype.mode,
        dtype.half,
        ops=lists,
        compute=dtype.compute,
        master_weights=dtype.master_weights,
        products=dtype.products,
        recipes=recipes,
    )


def in_fp32(config: Config) -> Config:
    """Return the same options in fp32, where neither lists nor pins cast anything."""
    return replace(config, dtype=replace(config.dtype, mode="fp32", products="none"))


def build_scaler(config: Config) -> LossScaler:
    """Make the loss scaler that `loss_scaling._target_` names, or `NoScaling`."""
    scaler: LossScaler = make("loss_scaling", config.loss_scaling) or NoScaling()
    option = f"loss_scaling._target_={config.loss_scaling['_target_']}"
    page = "docs/loss_scaling.md"
    require_methods(option, scaler, ("update", "to", "state_dict", "load_state_dict"), page)
    scale = getattr(scaler, "scale", None)
    if not isinstance(scale, Tensor) or scale.dim() or scale.dtype != torch.float32:
        raise ConfigError(
            f"{option}: its scale is {describe(scale)}; must be a 0-d float32 tensor; see {page}"
        )
    return scaler


def build_scalers(config: Config, task: Task, device: torch.device) -> Scaling:
    """Make one scaler, or one for each loss."""
    scaler = build_scaler(config).to(device)
    each = config.joint is not None and config.joint.scalers == "each"
    if not each or isinstance(scaler, NoScaling):
        return scaler
    return {name: build_scaler(config).to(device) for name in task.objectives}


def ranges_every(config: Config) -> int | None:
    """Return the steps between two reports of ranges, or None if none is made."""
    every: int | None = config.callbacks.get("ranges", {}).get("every")
    return every


def build_callbacks(config: Config, *, algorithms: bool = False) -> dict[str, Callback]:
    """Make the group's callbacks in their order: only each `Algorithm`, or only the others."""
    callbacks = {}
    for name, node in config.callbacks.items():
        target = find_target(f"callbacks.{name}", node["_target_"])
        if (isinstance(target, type) and issubclass(target, Algorithm)) is algorithms:
            callbacks[name] = make_a(Callback, f"callbacks.{name}", node)
    return callbacks


class RunCallbacks:
    """The callbacks of one run: `by_name` has all of them, in order, `group` between the fixed.

    The fixed ones are not in the group, so they cannot be left out:

        results, throughput    first, because others read what they count
        stream                 keeps the place in the training data, if they are a stream
        the group              in the order of its entries
        skip_guard             ends a run that only skips, once the group has seen the step
        checkpoints            saves the state of the others after the step
        stop_on_signal         last, once all others have dealt with the step
    """

    def __init__(
        self,
        group: Callbacks,
        speed: Throughput,
        guard: SkipGuard,
        save: SavePlan,
        stop: Callback,
        train: Loader,
    ) -> None:
        self.results, self.throughput, self.checkpoints = Results(), speed, Checkpoints(save)
        first: dict[str, Callback] = {"results": self.results, "throughput": speed}
        if isinstance(train, Callback):  # Only a stream's loader has a place to save.
            first["stream"] = train
        last = {"skip_guard": guard, "checkpoints": self.checkpoints, "stop_on_signal": stop}
        for name in group.keys() & (first.keys() | last.keys()):
            raise ConfigError(
                f"callbacks.{name}: every run has a callback of this name; give yours another name"
            )
        self.by_name = {**first, **group, **last}


def callbacks_of(
    config: Config, began: float, interruption: Interruption, train: Loader
) -> RunCallbacks:
    """Make the callbacks of a configured run that began at a time of `perf_counter`."""
    options, every = config.trainer, config.trainer.checkpoint_every
    plan = SavePlan(
        every=None if isinstance(every, str) else every,
        minutes=parse_measure(every, "min"),
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        background=options.async_save,
    )
    guard = SkipGuard(options.max_consecutive_skips, config.loss_scaling.get("hysteresis", 1))
    throughput = Throughput(config.data.batch_size, began)
    return RunCallbacks(build_callbacks(config), throughput, guard, plan, interruption, train)
