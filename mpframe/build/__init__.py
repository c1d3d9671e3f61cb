"""From a checked configuration to objects: the one place that knows the options and makes them.

No other package instantiates a `_target_`, and no package below this one reads an option.
"""

from mpframe.build.callbacks import build_callbacks
from mpframe.build.data import Loaders, build_loaders, build_task, evaluation_loader
from mpframe.build.device import resolve_device, seed_everything
from mpframe.build.model import build_model
from mpframe.build.precision import build_precision, in_fp32
from mpframe.build.scaling import build_scaler, scaling_name
from mpframe.build.target import make
from mpframe.build.trainer import build_plan, build_trainer

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
