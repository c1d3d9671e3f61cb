"""What a dataset hands to a trainer: the samples, the loss to lower and the metric to report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from mpframe.data.metrics import Accuracy
from mpframe.errors import DataError
from mpframe.user_code import described

Batch = tuple[Tensor, Tensor]
"""(inputs, targets), both with the samples along dimension 0."""


Loss = Callable[[Any, Any], Tensor]


class Metric(Protocol):
    """A running value over one validation pass.

    Attributes:
        name: one word; its tag is `metric/<name>/val`.
        higher_is_better: which of two values `trainer.keep_best` keeps.
    """

    name: str
    higher_is_better: bool

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Take in one batch; must not wait for the device."""

    def value(self) -> Tensor:
        """The metric so far: 0-d float64 on the device of the outputs."""


@dataclass(frozen=True)
class Task:
    """A learning problem, complete.

    Attributes:
        train: map-style samples (input, target) to learn from.
        val: map-style samples to measure on, never augmented.
        loss: loss(outputs, targets) -> 0-d tensor, the mean over the batch; or several by name, for
            a model that is called with the name as its second argument.
        metric: makes a fresh `Metric` for each validation pass.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    loss: Loss | Mapping[str, Loss]
    metric: Callable[[], Metric]

    def __post_init__(self) -> None:
        """Refuse what cannot be called.

        Raises:
            DataError: there is no loss, or a loss or the metric is not callable.
        """
        called: dict[str, Any] = {"metric": self.metric, "loss": self.loss}
        if isinstance(self.loss, Mapping):
            del called["loss"]
            called |= {f"loss {name}": loss for name, loss in self.loss.items()}
        if len(called) < 2:
            raise DataError("dataset: Task(loss={}) has no loss; give one, or several by name")
        for name, code in called.items():
            if not callable(code):
                raise DataError(
                    f"dataset: the {name} of its Task is {described(code)}; it must be a function "
                    "or a class that can be called"
                )


def classification(train: Dataset[Any], val: Dataset[Any]) -> Task:
    """A task with one class per sample: cross-entropy on logits [N, classes], and accuracy."""
    return Task(train, val, nn.CrossEntropyLoss(), Accuracy)
