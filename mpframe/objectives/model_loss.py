"""The objective of a model that returns its own loss, as Hugging Face's do."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.objectives.supervised import outside_casts
from mpframe.tree import to_fp32
from mpframe.user_code import UserCode, described, name_of

# In a model's `loss_type`, or if that is None in the name of its class.
_SHIFTS_LABELS = ("ForCausalLM", "ForConditionalGeneration", "LMHead")


def model_loss(model: nn.Module, batch: Any) -> StepOutput:
    """The loss of `model(**batch)`; metrics get its `logits` in fp32 and the batch's `labels`.

    The model computes its loss inside the casts, so the op lists decide its format (losses and
    large reductions are fp32 by default).

    It counts the labels other than -100. A causal model compares each output with the next label
    and leaves out the first of each row, and so does the count: if `model.loss_type`, which
    transformers sets, is `ForCausalLM` or `ForConditionalGeneration` and the model is no
    encoder-decoder. `shift_labels` in the batch are counted as they are. A batch without labels,
    with labels that are not integers, or for CTC counts its samples.

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
        count = _labels_in(arguments, model)
        return StepOutput(loss, to_fp32(_outputs(result)), targets, count)


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


def _labels_in(arguments: Mapping[str, Any], model: nn.Module) -> Tensor | None:
    """How many labels the loss is the mean of, 0-d; None if it is a mean over samples."""
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


def _outputs(result: Any) -> Any:
    logits = _named(result, "logits")
    if logits is None and isinstance(result, Mapping):
        return {name: value for name, value in result.items() if name != "loss"} or None
    return logits


def _named(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
