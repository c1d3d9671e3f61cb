"""The objective of a model that returns its own loss, as Hugging Face's do."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.objectives.supervised import outside_casts
from mpframe.tree import to_fp32
from mpframe.user_code import UserCode, described, name_of


def model_loss(model: nn.Module, batch: Any) -> StepOutput:
    """The loss of `model(**batch)`; metrics get its `logits` in fp32 and the batch's `labels`.

    The model computes its loss inside the casts, so the op lists decide its format (losses and
    large reductions are fp32 by default).

    Args:
        model: returns a dict, or an object with attributes, with `loss` and (for metrics) `logits`.
        batch: a mapping with the names of the model's arguments.

    Raises:
        UserCodeError: the batch is no mapping, the model raised or returned no loss.
    """
    if not isinstance(batch, Mapping):
        raise UserCodeError(
            f"objective: model_loss calls the model with keywords, and the dataset gave "
            f"{described(batch)}; let it give a dict of the model's arguments"
        )
    with UserCode("model:", model, batch=batch):
        result = model(**batch)
    loss = _named(result, "loss")
    if loss is None:
        raise UserCodeError(
            f"model: {name_of(model)} gave {described(result)} without a loss; give it its "
            "labels, or use an objective that computes the loss"
        )
    with outside_casts():
        return StepOutput(loss, to_fp32(_named(result, "logits")), batch.get("labels"))


def _named(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
