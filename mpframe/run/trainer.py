"""The trainer, in which everything is put together."""

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpframe.config.schema import Config
from mpframe.core.callback import Algorithm
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, RunInterrupted, first_line
from mpframe.core.trainer import StepOptimizer
from mpframe.core.tree import device_of, map_tensors
from mpframe.data.task import Task, training_loader
from mpframe.precision.precision import Precision
from mpframe.run.optimizer import build_optimizers, build_schedule
from mpframe.run.parts import (
    build_callbacks,
    build_layout,
    build_metrics,
    build_model,
    build_precision,
    build_scalers,
    ranges_every,
    resolve_device,
    to_device,
)
from mpframe.run.sharding import build_deferred, refuse_beside_sharding, shard, trace_deferred
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.schedules import Schedule, Schedules
from mpframe.training.evaluation import Evaluator
from mpframe.training.memory import recompute, to_channels_last
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.parallel.sync_batchnorm import synchronize
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


def build_trainer(config: Config, task: Task, batches: int, comm: Comm = SINGLE_PROCESS) -> Trainer:
    """Make model, optimizer, schedule and scaler, in the dtype mode and on the device."""
    _refuse_compiled(config)
    device, layout = resolve_device(config.run.device), build_layout(config)
    sharded = config.trainer.parallel == "fsdp" and comm.size > 1  # Other commands have one rank.
    if sharded:
        refuse_beside_sharding(config, layout)
    # A model to be divided may be too large for one device: its blocks go there one by one.
    home = torch.device("cpu") if sharded else device
    model, deferred = build_deferred(config) if sharded else (build_model(config).to(home), None)
    if config.trainer.sync_batchnorm and comm.size > 1:
        synchronize(model)
    precision = build_precision(config)
    for objective in task.objectives.values():
        to_device(objective, home)
    _trace(config, task, model, precision, deferred)
    optimizers = build_optimizers(config, model)
    # How long to train and how often to validate: options of `trainer` by the same name.
    plan = Plan(**{field.name: getattr(config.trainer, field.name) for field in fields(Plan)})
    numbers, metrics = partial(plan.numbers, batches), build_metrics(config, task)
    if sharded:
        shard(model, optimizers, precision, comm, device, layout, deferred, bool(plan.compile))
        plan = replace(plan, compile=False)
        device = torch.device("cpu") if layout.cpu_offload else device
        for objective in task.objectives.values():
            to_device(objective, device)
    schedules = {n: build_schedule(config, o, numbers, metrics) for n, o in optimizers.items()}
    recompute(model, config.trainer.recompute)
    if config.trainer.channels_last:
        to_channels_last(model)
    masters = {name: precision.prepare(model, o)[1] for name, o in optimizers.items()}
    optimizer: StepOptimizer = next(iter(masters.values()))
    if config.joint is not None:
        several = isinstance(task.objective, Mapping)
        optimizer = MultiOptimizer(masters, skip=config.joint.skip, own_losses=several)
    return _kind_of(task, optimizer, config.trainer.compile)(
        model=model,
        optimizer=optimizer,
        objective=task.objective,  # type: ignore[arg-type]  # Several go to the kind for several.
        precision=precision,
        scaler=build_scalers(config, task, device),
        algorithms=_build_algorithms(config, model, optimizer, schedules),
        plan=plan,
        evaluator=Evaluator(metrics, config.trainer.monitor),
        comm=comm,
    )


def _kind_of(task: Task, optimizer: StepOptimizer, compiled: bool | str) -> type[Trainer]:
    """Choose the trainer for these objectives and this optimizer, and import only that one."""
    if isinstance(task.objective, Mapping):
        from mpframe.training.trainers.multi_objective import MultiObjectiveTrainer

        return MultiObjectiveTrainer
    if optimizer.needs_closure:
        from mpframe.training.trainers.lbfgs import ClosureTrainer

        return ClosureTrainer
    if compiled == "step":
        from mpframe.training.trainers.compiled_step import CompiledTrainer

        return CompiledTrainer
    return Trainer


def _trace(
    config: Config, task: Task, model: nn.Module, precision: Precision, deferred: Any = None
) -> None:
    """Show `precision` each objective on the first training batch, the same in every command.

    In every mode, lazy layers get their shapes from it.
    """
    if not precision.policy.stores_by_op and not any(map(is_lazy, model.parameters())):
        return
    train = training_loader(task, config.data.batch_size, config.run.seed)
    device = device_of(model)
    model.train()
    try:
        batch = map_tensors(lambda tensor: tensor.to(device), next(train.epoch(0)))
        for objective in task.objectives.values():
            trace_deferred(precision, model, partial(objective, batch=batch), deferred)
    except (RunInterrupted, ConfigError):  # No first step would take such options.
        raise
    except (Exception, SystemExit) as error:  # The first step meets the same error, and says more.
        log.warning(
            "warning: the first batch could not be traced (%s): if it trains all the same, weights "
            "of classes that are not torch.nn's stay fp32",
            first_line(error.__cause__ or error),
        )


def _refuse_compiled(config: Config) -> None:
    """Refuse options that need a model's modules one by one: a compiled model is one graph."""
    if not config.trainer.compile:
        return
    every = ranges_every(config)
    if every is not None:
        raise ConfigError(
            f"callbacks.ranges.every={every}: a compiled model has no modules to watch; "
            "use trainer.compile=false or numerics=off"
        )
    if config.trainer.recompute:
        raise ConfigError(
            f"trainer.recompute={config.trainer.recompute}: a compiler chooses itself what it "
            "computes again; use trainer.compile=false or trainer.recompute=[]"
        )


def _build_algorithms(
    config: Config,
    model: nn.Module,
    optimizer: StepOptimizer,
    schedules: Mapping[str, Schedule | None],
) -> dict[str, Algorithm]:
    """Make what changes the training outside of the step, in the order of the calls."""
    algorithms: dict[str, Any] = {}
    planned = {name: schedule for name, schedule in schedules.items() if schedule is not None}
    if planned:
        algorithms["schedule"] = Schedules(planned)
    if config.trainer.ema_decay is not None:
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        masters = {parameter: optimizer.master_of(parameter) for parameter in trained}
        algorithms["ema"] = Ema(model, masters, config.trainer.ema_decay)
    return {**algorithms, **build_callbacks(config, algorithms=True)}
