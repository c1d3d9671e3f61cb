"""The objective of supervised learning: the model gets the inputs, the loss gets the targets."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import StepOutput
from mpframe.precision.casting.blocks import block
from mpframe.tree import to_fp32
from mpframe.user_code import blame, described, name_of

Loss = Callable[[Any, Any], Tensor]


class Supervised:
    """Batches are pairs (inputs, targets); the loss is computed in fp32, outside the casts.

    Args:
        loss: loss(outputs, targets) -> 0-d tensor, the mean over the batch. It is given the
            model's outputs in fp32 or wider.
        option: the option that chose the loss, for messages.
    """

    def __init__(self, loss: Loss, option: str = "objective") -> None:
        self.loss = loss
        self._option = f"{option}: the loss"

    @property
    def source(self) -> str:
        """What an error calls it."""
        return f"{self._option} {name_of(self.loss)}"

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """The loss, the outputs in fp32, and the targets.

        Raises:
            UserCodeError: the batch is no pair, or model or loss raised.
        """
        inputs, targets = _pair(batch)
        try:
            outputs = model(inputs)
        except BaseException:
            blame("model:", model, inputs=inputs)
        with block(None):  # The loss is fp32: no op of it is cast.
            outputs = to_fp32(outputs)
            try:
                loss = self.loss(outputs, targets)
            except BaseException:
                blame(self._option, self.loss, outputs=outputs, targets=targets)
        return StepOutput(loss, outputs, targets)


def supervised(loss: Loss) -> Supervised:
    """The objective of a loss(outputs, targets), for batches of (inputs, targets).

    Args:
        loss: gives a 0-d tensor, the mean over the batch, e.g. `nn.CrossEntropyLoss()`.
    """
    return Supervised(loss)


def outside_casts() -> AbstractContextManager[None]:
    """Within the block no op is cast: for a loss whose inputs are in fp32 already."""
    return block(None)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserCodeError(
            f"objective: supervised takes batches of (inputs, targets), and the dataset gave "
            f"{described(batch)}; give it such pairs, use objective=model_loss or write an "
            "objective of your own"
        )
    inputs, targets = batch
    return inputs, targets
