"""mpframe: training in which precision is a first-class, inspectable choice.

The public names are loaded when first used, so that a command line can be checked, and `--help`
answered, without importing torch. docs/python_first.md shows them at work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpframe.core.callback import Callback as Callback
    from mpframe.core.loss_scaling import Backoff as Backoff
    from mpframe.core.loss_scaling import LogMax as LogMax
    from mpframe.core.loss_scaling import Static as Static
    from mpframe.core.optim.master_weights import MasterWeights as MasterWeights
    from mpframe.core.step_result import StepResult as StepResult
    from mpframe.data.loading import Loader as Loader
    from mpframe.data.task import Task as Task
    from mpframe.precision.op_lists import OpLists as OpLists
    from mpframe.precision.precision import Precision as Precision
    from mpframe.run.fit import fit as fit
    from mpframe.run.run import train as train
    from mpframe.training.callbacks.guards import EarlyStopping as EarlyStopping
    from mpframe.training.callbacks.records import Curves as Curves
    from mpframe.training.callbacks.schedules import Schedules as Schedules
    from mpframe.training.evaluation import Evaluator as Evaluator
    from mpframe.training.plan import Plan as Plan
    from mpframe.training.trainer import Trainer as Trainer

_HOMES = {
    "core.callback": ["Callback"],
    "precision.op_lists": ["OpLists"],
    "core.loss_scaling": ["Backoff", "LogMax", "Static"],
    "core.optim.master_weights": ["MasterWeights"],
    "precision.precision": ["Precision"],
    "core.step_result": ["StepResult"],
    "data.loading": ["Loader"],
    "data.task": ["Task"],
    "run.fit": ["fit"],
    "run.run": ["train"],
    "training.callbacks.guards": ["EarlyStopping"],
    "training.callbacks.records": ["Curves"],
    "training.callbacks.schedules": ["Schedules"],
    "training.evaluation": ["Evaluator"],
    "training.plan": ["Plan"],
    "training.trainer": ["Trainer"],
}

__version__ = "0.1.0"

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mpframe.{home}"), name)
    raise AttributeError(f"module 'mpframe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
