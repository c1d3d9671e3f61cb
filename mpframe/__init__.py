"""mpframe: training in which precision is a first-class, inspectable choice.

The public names are loaded when first used, so that a command line can be checked, and `--help`
answered, without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpframe.core.casting.op_lists import OpLists
    from mpframe.core.loss_scaling import Backoff, LogMax, Static
    from mpframe.core.optim.master_weights import MasterWeights
    from mpframe.core.precision import Precision
    from mpframe.core.step_result import StepResult
    from mpframe.run.run import train
    from mpframe.training.trainer import Trainer

_HOMES = {
    "Backoff": "mpframe.core.loss_scaling",
    "LogMax": "mpframe.core.loss_scaling",
    "MasterWeights": "mpframe.core.optim.master_weights",
    "OpLists": "mpframe.core.casting.op_lists",
    "Precision": "mpframe.core.precision",
    "Static": "mpframe.core.loss_scaling",
    "StepResult": "mpframe.core.step_result",
    "Trainer": "mpframe.training.trainer",
    "train": "mpframe.run.run",
}

__version__ = "0.1.0"

__all__ = [
    "Backoff",
    "LogMax",
    "MasterWeights",
    "OpLists",
    "Precision",
    "Static",
    "StepResult",
    "Trainer",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpframe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
