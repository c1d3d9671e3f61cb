"""The samples, objective and metrics that a dataset hands to a trainer, and their loaders.

A config states channels, sizes and classes of a dataset, because models are built from them before
any file is opened. `require_facts` compares them with the files.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.objective import LossFunction, Objective, Supervised, require_objective
from mpframe.core.ranges import make_range_error, require_whole
from mpframe.core.user_code import describe
from mpframe.data.fetching import Collate
from mpframe.data.loading import Loader
from mpframe.data.metrics import Accuracy


class Metric(Protocol):
    """A running value over one validation pass.

    Attributes:
        name: one word for the tags `metric/<name>/val` and `metric/<name>/test`, unless the Task
            gives the metric by name.
        higher_is_better: which of two values `trainer.keep_best` keeps.
    """

    name: str
    higher_is_better: bool

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch without waiting for the device."""

    def compute(self) -> Tensor:
        """Return the metric so far: 0-d float64 on the device of the outputs."""


@dataclass(frozen=True)
class Task:
    """A learning problem, complete.

    Attributes:
        train: samples to learn from: a map-style dataset, or a stream (see docs/streams.md).
        val: samples to measure on while training, never augmented. They choose the best
            checkpoint and the end of the training.
        objective: objective(model, batch) -> StepOutput, or several by name for several optimizers.
            If None, the group `objective` gives it.
        metric: makes a fresh `Metric` for each validation pass, or several by name, among which
            torchmetrics objects may be. If None, only the loss is measured.
        collate: makes a batch, any tree of tensors, of a list of samples, and is sent to the
            workers. None is torch's default_collate.
        loss: loss(outputs, targets) -> 0-d tensor, the mean over a batch of samples (input,
            target). It is short for `objective=supervised(loss)`.
        test: samples that choose nothing, measured once at the end of a run, never
            augmented. If None, nothing is.
        class_names: the name of each class, in the order of their numbers.
        preprocessing: how a raw input becomes the model's, as JSON values, like
            `Normalize.described`. Checkpoints and exports carry both.
        batches_per_epoch: for a stream, after how many batches it is validated, >= 1.

    DataError: an attribute cannot be used as described, or there are an objective and a loss.
    UserCodeError: an objective is a loss, or no function. TypeError, ValueError: the preprocessing
    is no JSON.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    objective: Objective | Mapping[str, Objective] = None  # type: ignore[assignment]
    metric: Callable[[], Metric] | Mapping[str, Any] | None = None
    collate: Collate | None = None
    loss: InitVar[LossFunction | None] = None
    test: Dataset[Any] | None = None
    class_names: Sequence[str] | None = None
    preprocessing: Mapping[str, Any] | None = None
    batches_per_epoch: int | None = None

    def __post_init__(self, loss: LossFunction | None) -> None:
        stated: Any = self.objective
        if loss is not None:
            if stated is not None:
                raise DataError("dataset: its Task has an objective and a loss; give one of them")
            given: Any = loss
            if isinstance(given, type) and issubclass(given, nn.Module):
                name = given.__name__
                raise DataError(f"dataset: the loss of its Task is a class; make it {name}()")
            object.__setattr__(self, "objective", Supervised(loss, "dataset"))
        objectives = {} if self.objective is None else self.objectives
        metric = None if isinstance(self.metric, Mapping) else self.metric
        for name, code in (("loss", loss), ("metric", metric), ("collate", self.collate)):
            _require(name, code, code is None or callable(code), "a function or a class")
        names: Any = self.class_names
        listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        _require("class_names", names, names is None or listed, "a list of strings")
        json.dumps(self.preprocessing, allow_nan=False)  # It raises now, and not at the first save.
        for name, objective in objectives.items():
            require_objective(f"dataset: the objective {name}".strip(), objective)

    @property
    def objectives(self) -> Mapping[str, Objective]:
        """Return the objectives by name, the only one under the name ""."""
        named = self.objective if isinstance(self.objective, Mapping) else {"": self.objective}
        if not named or None in named.values():
            raise DataError(
                "dataset: its Task has no objective; give it one, several by name, or a loss"
            )
        return named


def _require(name: str, given: Any, fits: bool, allowed: str) -> None:
    if not fits:
        raise DataError(
            f"dataset: the {name} of its Task is {describe(given)}; it must be {allowed}"
        )


def classification(
    train: Dataset[Any],
    val: Dataset[Any],
    test: Dataset[Any] | None = None,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> Task:
    """Return a task with one class per sample: cross-entropy of logits [N, classes], accuracy."""
    loss = Supervised(nn.CrossEntropyLoss(), "dataset")
    return Task(train, val, loss, Accuracy, None, None, test, class_names, preprocessing)


def require_counts(least: int = 1, /, **counts: int) -> None:
    """Check that each option `dataset.<name>` is a whole number >= `least`."""
    for name, count in counts.items():
        require_whole(f"dataset.{name}", count, least)


def require_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Check that `dataset.<option>` is one of some values."""
    if value not in choices:
        allowed = f"one of {', '.join(map(str, choices))}"
        raise make_range_error(f"dataset.{option}", value, allowed)


def require_facts(dataset: str, **facts: tuple[object, object]) -> None:
    """Compare the stated with the true value of each option: (stated, true)."""
    for option, (stated, true) in facts.items():
        if stated != true:
            raise ConfigError(
                f"dataset.{option}={stated}: {dataset} has {true}; set dataset.{option}={true}"
            )


def require_labels(source: object, labels: Tensor, images: int, classes: int) -> None:
    """Check that the file has one label [N] in 0..classes-1 for each image."""
    ends = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if len(labels) != images or not 0 <= ends[0] <= ends[1] < classes:
        raise DataError(
            f"{source}: has {len(labels)} labels from {ends[0]} to {ends[1]}, and must have one "
            f"from 0 to {classes - 1} for each of {images} images; get the file again"
        )


def training_loader(task: Task, batch_size: int, seed: int, **options: Any) -> Loader:
    """Make the loader of a task's training data, shuffled and in whole batches only."""
    options |= {"seed": seed, "collate": task.collate, "batches_per_epoch": task.batches_per_epoch}
    return make_loader(task.train, batch_size, shuffle=True, drop_last=True, **options)


def make_loader(
    dataset: Any, batch_size: int, *, batches_per_epoch: int | None = None, **options: Any
) -> Loader:
    """Make the loader of a dataset or of a stream, with the options of `Loader`.

    A stream is an iterator of samples, or in batches already. It has its own order, so that
    `shuffle` is not used. With `drop_last` it begins again when it ends, and an epoch is
    `batches_per_epoch`. Without, it is read once.
    """
    iterates = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    if iterates or isinstance(dataset, IterableDataset | DataLoader):
        from mpframe.data.streaming import StreamLoader  # seldom needed

        del options["shuffle"]
        endless = options.pop("drop_last", False)
        return StreamLoader(
            dataset, batch_size, endless=endless, batches_per_epoch=batches_per_epoch, **options
        )
    if batches_per_epoch is not None:
        raise DataError(
            f"dataset: its Task has batches_per_epoch={batches_per_epoch}, which is for streams, "
            f"and {type(dataset).__name__} has a length; leave it out"
        )
    return Loader(dataset, batch_size, **options)
