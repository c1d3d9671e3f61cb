"""Objectives that a YAML file can name: losses with options, and the loss a model returns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.casts import outside_casts
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.objective import StepOutput, Supervised, supervised
from mpframe.core.tree import to_fp32
from mpframe.core.user_code import describe, name_of, user_code


def cross_entropy(
    weight: Sequence[float] | None = None, label_smoothing: float = 0.0
) -> Supervised:
    """Cross-entropy of logits [N, classes, ...] and classes, or probabilities of classes.

    Args:
        weight: of each class, >= 0 and finite, else ConfigError. None: all 1.
        label_smoothing: the share of each target that is spread over all classes, 0 to 1.
    """
    if weight is not None and not all(math.isfinite(one) and one >= 0 for one in weight):
        raise ConfigError(f"objective.weight={list(weight)}: must be finite numbers >= 0, or null")
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float32)
    return supervised(nn.CrossEntropyLoss(weights, label_smoothing=label_smoothing))


def mse() -> Supervised:
    """The mean squared error of outputs and targets of one shape."""
    return supervised(nn.MSELoss())


# In a model's `loss_type`, or if that is None in the name of its class.
_SHIFTS_LABELS = ("ForCausalLM", "ForConditionalGeneration", "LMHead")


def model_loss(model: nn.Module, batch: Any) -> StepOutput:
    """Return the loss of `model(**batch)`, and for metrics its `logits` in fp32 and the `labels`.

    The model computes its loss inside the casts, so the op lists decide its format (losses and
    large reductions are fp32 by default).

    It counts the labels other than -100. A causal model predicts the next label, so the first of
    each row does not count if `model.loss_type`, which transformers sets, is `ForCausalLM` or
    `ForConditionalGeneration` and the model is no encoder-decoder. `shift_labels` in the batch are
    counted as they are. Without labels, with labels that are not integers, or for CTC, the batch's
    samples are counted.

    Args:
        model: returns a dict, or an object with attributes, with `loss` and (for metrics) `logits`.
            From a mapping without `logits` (a model with several outputs) metrics get everything
            except the loss.
        batch: a mapping from the model's argument names to values, or a pair of such a mapping
            and the metrics' targets in place of `labels`, which the model does not see.

    Raises:
        UserCodeError: the batch is no mapping, the model raised or returned no loss.
    """
    arguments, targets = _split(batch)
    with user_code("model:", model, batch=arguments):
        result = model(**arguments)
    loss = _get(result, "loss")
    if loss is None:
        raise UserCodeError(
            f"model: {name_of(model)} gave {describe(result)} without a loss; give it its "
            "labels, or use an objective that computes the loss"
        )
    with outside_casts():
        outputs = _get(result, "logits")
        if outputs is None and isinstance(result, Mapping):
            outputs = {name: value for name, value in result.items() if name != "loss"} or None
        return StepOutput(loss, to_fp32(outputs), targets, _count_labels(arguments, model))


def _split(batch: Any) -> tuple[Mapping[str, Any], Any]:
    """Return the model's arguments, and what the metrics compare its outputs with."""
    if isinstance(batch, Mapping):
        return batch, batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Mapping):
        return batch[0], batch[1]
    raise UserCodeError(
        f"objective: model_loss calls the model with keywords, and the dataset gave "
        f"{describe(batch)}; let it give a dict of the model's arguments"
    )


def _count_labels(arguments: Mapping[str, Any], model: nn.Module) -> Tensor | None:
    """Return how many labels the loss is the mean of, 0-d, or None if it is a mean over samples."""
    kind = getattr(model, "loss_type", "")
    if kind is None:  # For a GPT2LMHeadModel, say: transformers takes its causal loss.
        kind = type(getattr(model, "_orig_mod", model)).__name__
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor) or labels.is_floating_point() or "CTC" in str(kind):
        return None
    to_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if shifted is None and not to_decoder and any(name in str(kind) for name in _SHIFTS_LABELS):
        labels = labels[..., 1:]
    return (labels != -100).sum()  # torch ignores these by default


def _get(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
