"""What a stranger must know to use a run's weights; each checkpoint carries it, and each export.

    inputs           what the model is called with: name, shape and dtype; null is the batch size
    class_names      of the dataset, and its preprocessing, as its Task says
    precision        dtype mode, half format, op lists, and which weights are stored in half
    versions         of torch, torchvision and mpframe

All of it is known while the dataset and the user's code are there, and an export needs neither.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mpframe.checkpoint.export import versions
from mpframe.data.loading import Loader
from mpframe.data.task import Task
from mpframe.errors import RunInterrupted
from mpframe.objectives import Objective
from mpframe.precision.undisturbed import undisturbed
from mpframe.run.description import ops_in_words
from mpframe.training.trainer import Trainer
from mpframe.tree import HALF, dtype_name, named_tensors


def usage_of(task: Task, trainer: Trainer) -> dict[str, Any]:
    """What this module's docstring lists, as JSON values; null for what cannot be known."""
    names = task.class_names
    return {
        "inputs": _inputs_of(task, trainer.model),
        "class_names": None if names is None else list(names),
        "preprocessing": None if task.preprocessing is None else dict(task.preprocessing),
        "precision": _precision_of(trainer),
        "versions": versions(),
    }


def _precision_of(trainer: Trainer) -> dict[str, Any]:
    policy = trainer.precision.policy
    weights = trainer.model.named_parameters()
    return {
        "mode": policy.mode,
        "half": None if policy.mode == "fp32" else policy.half,
        "ops": None if policy.mode == "fp32" else ops_in_words(policy.ops).replace("`", ""),
        "half_weights": [name for name, weight in weights if weight.dtype in HALF],
        "evaluated_in": str(trainer.eval_precision or trainer.precision),
    }


def _inputs_of(task: Task, model: nn.Module) -> list[dict[str, Any]] | None:
    """What the objective calls the model with, for one sample of the validation data."""
    if isinstance(task.objective, Mapping):
        return None  # Several losses call the model's parts, each in its own way.
    try:
        call = _call_of(task.objective, _one_sample(task))
        given = inspect.signature(model.forward).bind(*call[0], **call[1]).arguments
    except RunInterrupted:
        raise
    except (Exception, SystemExit):  # Users' code; if something is wrong, the run will say it.
        return None
    return [
        {"name": name, "shape": _shape(tensor), "dtype": dtype_name(tensor.dtype)}
        for name, tensor in named_tensors(dict(given))
    ]


def _one_sample(task: Task) -> Any:
    return next(Loader(task.val, 1, shuffle=False, collate=task.collate).epoch(0))


def _call_of(objective: Objective, batch: Any) -> tuple[Any, Any]:
    """The arguments and keywords that the objective calls its model with."""
    model = _Recorder()
    with undisturbed(model):
        try:
            objective(model, batch)
        except Exception:
            if model.call is None:
                raise
        assert model.call is not None
        return model.call


class _Called(Exception):  # noqa: N818 - not an error, but the way out of the objective
    pass


class _Recorder(nn.Module):
    """Stands in for a model: keeps what it is called with, and goes no further."""

    call: tuple[Any, Any] | None = None

    def forward(self, *arguments: Any, **keywords: Any) -> None:
        self.call = arguments, keywords
        raise _Called


def _shape(tensor: Tensor) -> list[int | None]:
    return [None, *tensor.shape[1:]] if tensor.dim() else []
