"""What a validation gives, the metric it takes, and the fp32 weights it may be made with."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.optim import MasterWeights, MultiOptimizer
from mpframe.user_code import UserCode, described, name_of


@dataclass(frozen=True)
class Evaluation:
    """One validation: the mean loss per sample, and the metric by name.

    Attributes:
        loss: mean loss per sample.
        metric: the metric's name; `none` without one.
        value: its value; nan without one.
        higher_is_better: the metric's direction; None where it does not tell.
    """

    loss: float
    metric: str
    value: float
    higher_is_better: bool | None = None

    @property
    def watched(self) -> float:
        """What tells progress: the metric where it has a direction, else the loss."""
        return self.loss if self.higher_is_better is None else self.value


class Metric:
    """A user's metric over one validation.

    Args:
        make: makes it, fresh.

    Raises:
        UserCodeError: it cannot be made or has no name; here and below, it raised.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._code = make
        with UserCode("dataset: the metric", make):
            self._metric = make()
        name = getattr(self._metric, "name", None)
        if not isinstance(name, str) or not name:
            raise UserCodeError(
                f"dataset: the metric {name_of(make)} has {name!r} for a name; it must be a word, "
                "as in name = 'accuracy'"
            )
        self.name = name

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in one batch.

        Raises:
            UserCodeError: the objective gave no outputs to measure.
        """
        if outputs is None:
            raise UserCodeError(
                f"objective: gave no outputs, and the metric {self.name} measures them; let it "
                "return StepOutput(loss, outputs, targets)"
            )
        with UserCode("dataset: the metric", self._code, outputs=outputs, targets=targets):
            self._metric.update(outputs, targets)

    def evaluation(self, loss: float) -> Evaluation:
        """The validation's result, beside its loss.

        Raises:
            UserCodeError: the metric's value is not one number.
        """
        with UserCode("dataset: the metric", self._code):
            value = self._metric.value()
        one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not one:
            raise UserCodeError(
                f"dataset: the metric {name_of(self._code)} gave {described(value)} as its value; "
                "it must be one number"
            )
        higher = getattr(self._metric, "higher_is_better", None)
        return Evaluation(loss, self.name, float(value), higher)


@contextmanager
def fp32_weights(
    optimizer: MasterWeights | MultiOptimizer, model: nn.Module, but: Container[nn.Parameter] = ()
) -> Iterator[None]:
    """Within the block half weights are replaced by copies of their fp32 masters, save `but`."""
    narrow = (p for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16))
    half = {p: p.data for p in narrow if p not in but}
    try:
        for parameter in half:
            parameter.data = optimizer.master_of(parameter).detach().float().clone()
        yield
    finally:
        for parameter, weight in half.items():
            parameter.data = weight
