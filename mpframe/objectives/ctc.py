"""Connectionist temporal classification (Graves et al. 2006), for sequences without an alignment.

A model gives each frame a distribution over the labels and a blank. The loss is -log of the summed
probability of all ways to place the target's labels, in their order, on the frames. The sum is
taken over products of as many factors as there are frames: `log_softmax` and `ctc_loss` are in
`ops.deny`, so it is taken in fp32.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.tree import to_fp32
from mpframe.user_code import UserCode, described

_NAMES = ("inputs", "input_lengths", "targets", "target_lengths")


def ctc(model: nn.Module, batch: Any, blank: int = 0) -> StepOutput:
    """The CTC loss of each sequence over its number of labels, averaged over the batch.

    The metrics are given `logits` [N, T, classes] in fp32 and `lengths`, and of the targets
    `labels` [N, L] and `lengths`.

    Args:
        model: called with `inputs` and `input_lengths`; gives logits [N, T, classes].
        batch: a mapping of inputs [N, T, ...], input_lengths, targets [N, L] and target_lengths;
            the lengths are lists of N whole numbers, so that nothing waits for the device.
        blank: the class of a frame without a label.

    Raises:
        UserCodeError: the batch is not such a mapping, or the model raised.
    """
    if not isinstance(batch, Mapping) or not batch.keys() >= set(_NAMES):
        raise UserCodeError(
            f"objective: ctc takes a mapping with {', '.join(_NAMES)}, and the dataset gave "
            f"{described(batch)}; let its collate make one"
        )
    inputs, frames, labels, lengths = (batch[name] for name in _NAMES)
    with UserCode("model:", model, inputs=inputs):
        logits = model(inputs, frames)
    log_probs = F.log_softmax(logits, dim=2).transpose(0, 1)
    loss = F.ctc_loss(log_probs, labels, frames, lengths, blank)
    outputs = {"logits": to_fp32(logits), "lengths": frames}
    return StepOutput(loss, outputs, {"labels": labels, "lengths": lengths}, count=len(lengths))
