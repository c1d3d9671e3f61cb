"""From a checked configuration to objects: the one place that knows the options and makes them.

    target     makes what a `_target_` names, or says why it cannot
    parts      model, data, objective, metrics, precision, loss scaler, callbacks
    optimizer  optimizers, schedules, the average of the weights
    trainer    puts everything together

No other package instantiates a `_target_`, and no package below this one reads an option.
"""

from mpframe.assembly.parts import (
    Loaders,
    build_callbacks,
    build_loaders,
    build_model,
    build_precision,
    build_scaler,
    build_task,
    evaluation_loader,
    in_fp32,
    resolve_device,
    scaling_name,
    seed_everything,
)
from mpframe.assembly.target import make
from mpframe.assembly.trainer import build_plan, build_trainer

__all__ = [
    "Loaders",
    "build_callbacks",
    "build_loaders",
    "build_model",
    "build_plan",
    "build_precision",
    "build_scaler",
    "build_task",
    "build_trainer",
    "evaluation_loader",
    "in_fp32",
    "make",
    "resolve_device",
    "scaling_name",
    "seed_everything",
]
