"""From a checked configuration to objects: the one place that knows the options and makes them.

Nothing else instantiates a `_target_`, and no part below reads an option.
"""

import inspect
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpframe.config.schema import Config
from mpframe.data.loader import Loader
from mpframe.data.task import Task
from mpframe.data.workers import require_workers
from mpframe.errors import ConfigError, MpframeError, RunInterrupted, UserCodeError, nearest
from mpframe.loss_scaling import Backoff, LogMax, Static
from mpframe.loss_scaling.interface import LossScaler, Scaling
from mpframe.optim import MasterWeights, MultiOptimizer
from mpframe.optim.ema import Ema
from mpframe.optim.optimizer_parts import Selection, divided
from mpframe.precision import OpLists, Precision
from mpframe.training.evaluation import Metric
from mpframe.training.loss_spike import LossSpikes
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer
from mpframe.training.turns import AnyOptimizer
from mpframe.tree import map_tensors
from mpframe.user_code import first_line, name_of, raised

log = logging.getLogger(__name__)


def seed_everything(seed: int) -> None:
    """Seed every generator that weights, dropout or a user's own code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def device_of(name: str) -> torch.device:
    """The device an option names; `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: there is no such device; nothing falls back.
    """
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


def build_task(config: Config) -> Task:
    """The dataset's samples, loss and metric."""
    task = make("dataset", config.dataset)
    if not isinstance(task, Task):
        raise ConfigError(
            f"dataset._target_={config.dataset['_target_']}: must return a mpframe.data.Task, "
            f"got {type(task).__name__}"
        )
    if Metric(task.metric).name == "loss":
        raise ConfigError(
            f"dataset._target_={config.dataset['_target_']}: its metric is named loss, and "
            "val_loss is the validation loss; give the metric another name"
        )
    return task


def build_loaders(config: Config, task: Task) -> tuple[Loader, Loader]:
    """The training loader (shuffled, whole batches only) and the validation loader."""
    data = config.data
    require_workers(data.workers)
    common: dict[str, Any] = {
        "seed": config.run.seed,
        "workers": data.workers,
        "worker_timeout": data.worker_timeout,
    }
    train = Loader(task.train, data.batch_size, shuffle=True, drop_last=True, **common)
    val = Loader(task.val, data.batch_size, shuffle=False, split="validation", **common)
    return train, val


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
    return Precision(
        dtype.mode,
        dtype.half,
        ops=lists,
        compute=dtype.compute,
        master_weights=dtype.master_weights,
    )


def _build_eval_precision(config: Config) -> Precision | None:
    """The mode to validate in: fp32, or fp32 weights with ops cast by the default lists."""
    dtype = config.trainer.eval_dtype
    if dtype is None:
        return None
    return Precision() if dtype == "fp32" else Precision("amp", dtype, compute=config.dtype.compute)


def scaling_name(config: Config) -> str:
    """The scaling that `auto` stands for: Backoff where half is float16, none otherwise."""
    name = str(config.loss_scaling.name)
    if name != "auto":
        return name
    float16 = config.dtype.mode != "fp32" and config.dtype.half == "float16"
    return "Backoff" if float16 else "none"


def named_options(config: Config) -> dict[str, Any]:
    """Every option by its dotted path; of the scaling `auto` the name of what it stands for."""
    return {**config.flat, "loss_scaling.name": scaling_name(config)}


def build_scaler(config: Config) -> LossScaler | None:
    """The loss scaler; None where the loss is not scaled."""
    arguments = {k: v for k, v in vars(config.loss_scaling).items() if k != "name"}
    half = {"half": getattr(torch, config.dtype.half)}
    makers: dict[str, Callable[..., LossScaler]] = {
        "static": Static,
        "Backoff": Backoff,
        "LogMax": LogMax,
    }
    name = scaling_name(config)
    if name == "none":
        return None
    return makers[name](**arguments, **(half if name != "static" else {}))


def build_trainer(config: Config, task: Task, batches: int) -> Trainer:
    """Model, optimizer, schedule and scaler, in the dtype mode and on the device.

    Args:
        config: the options.
        task: gives the loss and the metric.
        batches: micro-batches per epoch, for the schedule.
    """
    _refuse_unwatchable(config)
    device = device_of(config.run.device)
    model = _build_model(config).to(device)
    optimizers = _build_optimizers(config, model)
    plan = build_plan(config)
    steps = max(1, plan.total_steps(batches))
    schedules = {
        name: _build_schedule(config, own, steps, task) for name, own in optimizers.items()
    }
    precision = build_precision(config)
    _trace(config, task, model, precision)
    masters = {name: precision.prepare(model, own)[1] for name, own in optimizers.items()}
    optimizer = _joined(config, masters, task)
    return Trainer(
        model=model,
        optimizer=optimizer,
        loss=task.loss,
        precision=precision,
        scaler=_build_scalers(config, task, device),
        schedule={name: own for name, own in schedules.items() if own is not None},
        ema=_build_ema(config, model, optimizer),
        plan=plan,
        metric=task.metric,
        eval_precision=_build_eval_precision(config),
        spikes=_build_spikes(config),
    )


def _trace(config: Config, task: Task, model: nn.Module, precision: Precision) -> None:
    """Show `precision` the first batch of training, for each loss: the same in every command.

    Lazy layers get their shapes by it, in every mode.
    """
    if not precision.policy.stores_by_op and not any(map(is_lazy, model.parameters())):
        return
    train = Loader(task.train, config.data.batch_size, seed=config.run.seed, shuffle=True)
    device = device_of(config.run.device)
    model.train()
    try:
        inputs = map_tensors(lambda tensor: tensor.to(device), next(train.epoch(0))[0])
        for name in task.loss if isinstance(task.loss, Mapping) else [None]:
            precision.trace(model, (inputs,) if name is None else (inputs, name))
    except RunInterrupted:
        raise
    except (Exception, SystemExit) as error:  # The first step meets it too, and says more.
        log.warning(
            "warning: the first batch could not be traced (%s): weights of classes that are not "
            "torch.nn's stay fp32",
            first_line(error),
        )


def _build_model(config: Config) -> nn.Module:
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


def _build_optimizers(config: Config, model: nn.Module) -> dict[str, Optimizer]:
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


def _joined(config: Config, masters: dict[str, MasterWeights], task: Task) -> AnyOptimizer:
    """One optimizer over all; the only one is itself."""
    if config.joint is not None:
        several = isinstance(task.loss, Mapping)
        return MultiOptimizer(masters, skip=config.joint.skip, own_losses=several)
    return masters[""]


def _build_scalers(config: Config, task: Task, device: torch.device) -> Scaling:
    """One scaler, one for each loss, or none."""
    each = config.joint is not None and config.joint.scalers == "each"
    names = list(task.loss) if each and isinstance(task.loss, Mapping) else [""]
    scalers = {name: build_scaler(config) for name in names}
    ready = {name: own.to(device) for name, own in scalers.items() if own is not None}
    if not ready:
        return None
    return ready if each else ready[""]


def in_fp32(config: Config) -> Config:
    """The same options in fp32, where neither lists nor pins cast anything."""
    return replace(config, dtype=replace(config.dtype, mode="fp32"))


def _refuse_unwatchable(config: Config) -> None:
    """Ranges are taken from modules, and a compiled model has none."""
    if config.numerics.every is not None and config.trainer.compile:
        raise ConfigError(
            f"numerics.every={config.numerics.every}: a compiled model has no modules to watch; "
            "use trainer.compile=false or numerics=off"
        )


def build_plan(config: Config) -> Plan:
    """How long to train and how often to look."""
    options = config.trainer
    return Plan(
        epochs=options.epochs,
        max_steps=options.max_steps,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        eval_every=options.eval_every,
        whole_windows=options.bad_micro_batch == "skip",
        compile=options.compile,
    )


def make(section: str, node: dict[str, Any], *arguments: Any) -> Any:
    """Call an open section's `_target_` with its options.

    Raises:
        ConfigError: there is no such target, or it does not take these options.
    """
    target = node["_target_"]
    _refuse_unknown_arguments(section, target, node)
    try:
        return instantiate(node, _partial_=True, _convert_="all")(*arguments)
    except MpframeError:
        raise
    except InstantiationException as error:
        if isinstance(error.__cause__, MpframeError):
            raise error.__cause__ from None
        raise ConfigError(f"{section}: {str(error).splitlines()[0]}") from error
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise ConfigError(
            f"{section}: {target} refused its options: {first_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{section}: {target} raised {raised(error)}") from error


def _refuse_unknown_arguments(section: str, target: str, node: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(_found(section, target)).parameters
    except ValueError:
        return  # A C function that does not tell its parameters.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in node:
        if name not in parameters and not str(name).startswith("_"):
            hint = nearest(str(name), parameters)
            raise ConfigError(
                f"{section}.{name}={node[name]}: {target} takes no such argument; "
                f"{hint or 'it takes ' + ', '.join(parameters)}"
            )


def _found(section: str, target: str) -> Any:
    """What a `_target_` names."""
    try:
        return get_object(target)
    except (Exception, SystemExit) as error:  # Whatever importing the user's module raises.
        said = raised(error) if isinstance(error, SystemExit) else first_line(error)
        raise ConfigError(f"{section}._target_={target}: {said}") from error


def _build_schedule(
    config: Config, optimizer: Optimizer, total_steps: int, task: Task
) -> LRScheduler | None:
    if config.scheduler is None:
        return None
    node = dict(config.scheduler)
    target = _found("scheduler", node["_target_"])
    if "total_steps" in inspect.signature(target).parameters:
        node.setdefault("total_steps", total_steps)
    if isinstance(target, type) and issubclass(target, ReduceLROnPlateau):
        _set_direction(node, task.metric())
    return make("scheduler", node, optimizer)  # type: ignore[no-any-return]


def _set_direction(node: dict[str, Any], metric: Any) -> None:
    """Let a schedule that watches validation look for the metric's better values.

    Raises:
        ConfigError: it was told to look for the worse ones.
    """
    higher = getattr(metric, "higher_is_better", None)
    watched = "val_loss" if higher is None else f"val_{metric.name}"
    mode = "max" if higher else "min"
    if node.setdefault("mode", mode) != mode:
        raise ConfigError(
            f"scheduler.mode={node['mode']}: the schedule watches {watched}, where "
            f"{'more' if higher else 'less'} is better; use scheduler.mode={mode}"
        )


def _build_ema(config: Config, model: nn.Module, optimizer: AnyOptimizer) -> Ema | None:
    decay = config.trainer.ema_decay
    if decay is None:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    return Ema({p: optimizer.master_of(p) for p in trained}, decay)


def _build_spikes(config: Config) -> LossSpikes | None:
    policy, factor = config.trainer.on_loss_spike, config.trainer.loss_spike_factor
    return None if policy == "off" else LossSpikes(policy, factor)
