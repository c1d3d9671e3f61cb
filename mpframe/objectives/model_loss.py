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
            Of a mapping without `logits`, as that of a model with several outputs, metrics get all
            that is not the loss.
        batch: a mapping with the names of the model's arguments; or a pair of such a mapping and of
            what metrics get in the place of `labels`, which the model does not see.

    Raises:
        UserCodeError: the batch is no mapping, the model raised or returned no loss.
    """
    arguments, targets = _split(batch)
    with UserCode("model:", model, batch=arguments):
        result = model(**arguments)
    loss = _named(result, "loss")
    if loss is None:
        raise UserCodeError(
            f"model: {name_of(model)} gave {described(result)} without a loss; give it its "
            "labels, or use an objective that computes the loss"
        )
    with outside_casts():
        return StepOutput(loss, to_fp32(_outputs(result)), targets)


def _split(batch: Any) -> tuple[Mapping[str, Any], Any]:
    """The model's arguments, and what the metrics compare its outputs with."""
    if isinstance(batch, Mapping):
        return batch, batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Mapping):
        return batch[0], batch[1]
    raise UserCodeError(
        f"objective: model_loss calls the model with keywords, and the dataset gave "
        f"{described(batch)}; let it give a dict of the model's arguments"
    )


def _outputs(result: Any) -> Any:
    logits = _named(result, "logits")
    if logits is None and isinstance(result, Mapping):
        return {name: value for name, value in result.items() if name != "loss"} or None
    return logits


def _named(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
