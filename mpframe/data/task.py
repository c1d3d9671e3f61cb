"""The samples, the objective and the metrics that a dataset hands to a trainer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from mpframe.core.errors import DataError
from mpframe.core.objective import Loss, Objective, Supervised
from mpframe.core.user_code import described, name_of
from mpframe.data.loading import Collate
from mpframe.data.metrics import Accuracy


class Metric(Protocol):
    """A running value over one validation pass.

    Attributes:
        name: one word, unless the metric is given by name; its tags are `metric/<name>/val` and
            `metric/<name>/test`.
        higher_is_better: which of two values `trainer.keep_best` keeps.
    """

    name: str
    higher_is_better: bool

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in one batch; must not wait for the device."""

    def compute(self) -> Tensor:
        """Return the metric so far: 0-d float64 on the device of the outputs."""


@dataclass(frozen=True)
class Task:
    """A learning problem, complete.

    Attributes:
        train: map-style samples to learn from.
        val: map-style samples to measure on while training; never augmented. What is chosen (the
            best checkpoint, the end of the training) is chosen by them.
        objective: objective(model, batch) -> StepOutput; several by name for several optimizers.
            None: the group `objective` gives it.
        metric: makes a fresh `Metric` for each validation pass; several by name. A torchmetrics
            object stands as it is, by name. None: only the loss is measured.
        collate: makes a batch, any tree of tensors, of a list of samples; None: torch's
            default_collate. It is sent to the workers.
        loss: in the place of an objective: loss(outputs, targets) -> 0-d tensor, the mean over the
            batch, for samples (input, target); short for `objective=supervised(loss)`.
        test: map-style samples that choose nothing, measured once at the end of a run; never
            augmented. None: there is no such measurement.
        class_names: the name of each class, in the order of their numbers.
        preprocessing: what is done to a raw input before the model gets it, as JSON values; for
            images what `Normalize.described` gives. Checkpoints and exports carry both.

    Raises:
        DataError: there are an objective and a loss, or one of these cannot be called; or
            `class_names` are not strings, or `preprocessing` is not JSON.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    objective: Objective | Mapping[str, Objective] = None  # type: ignore[assignment]
    metric: Callable[[], Metric] | Mapping[str, Any] | None = None
    collate: Collate | None = None
    loss: InitVar[Loss | None] = None
    test: Dataset[Any] | None = None
    class_names: Sequence[str] | None = None
    preprocessing: Mapping[str, Any] | None = None

    def __post_init__(self, loss: Loss | None) -> None:
        if loss is not None:
            given: Any = self.objective
            if given is not None:
                raise DataError("dataset: its Task has an objective and a loss; give one of them")
            _require_callable("loss", loss)
            object.__setattr__(self, "objective", Supervised(loss, "dataset"))
        objectives = {} if self.objective is None else self.objectives
        if self.metric is not None and not isinstance(self.metric, Mapping):
            _require_callable("metric", self.metric)
        if self.collate is not None:
            _require_callable("collate", self.collate)
        _require_names(self.class_names)
        _require_json(self.preprocessing)
        several = isinstance(self.objective, Mapping)
        for name, objective in objectives.items():
            _require_callable(f"objective {name}" if several else "objective", objective)
            if isinstance(objective, nn.modules.loss._Loss):
                raise DataError(
                    f"dataset: the objective of its Task is {name_of(objective)}, a loss; give it "
                    f"as Task(..., loss={name_of(objective)}())"
                )

    @property
    def objectives(self) -> Mapping[str, Objective]:
        """Return the objectives by name, the only one under the name ""."""
        named = self.objective if isinstance(self.objective, Mapping) else {"": self.objective}
        if not named or None in named.values():
            raise DataError(
                "dataset: its Task has no objective; give it one, several by name, or a loss"
            )
        return named


def _require_callable(name: str, code: Any) -> None:
    if not callable(code):
        raise DataError(
            f"dataset: the {name} of its Task is {described(code)}; it must be a function or a "
            "class that can be called"
        )


def _require_names(names: Any) -> None:
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if names is not None and not listed:
        raise DataError(
            f"dataset: the class_names of its Task are {described(names)}; give a list of strings"
        )


def _require_json(preprocessing: Any) -> None:
    try:
        json.dumps(preprocessing, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"dataset: the preprocessing of its Task cannot be written as JSON ({error}); give "
            "finite numbers, strings, lists and dicts"
        ) from None


def classification(
    train: Dataset[Any],
    val: Dataset[Any],
    test: Dataset[Any] | None = None,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Task:
    """Return a task with one class per sample: cross-entropy on logits [N, classes], accuracy."""
    loss = Supervised(nn.CrossEntropyLoss(), "dataset")
    return Task(train, val, loss, Accuracy, None, None, test, class_names, preprocessing)
