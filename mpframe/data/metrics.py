"""Metrics that count on the device, in the manner of torchmetrics.

Metrics of classes leave out targets equal to `ignore_index` (-100), as torch's losses do.
An `update` only queues work: nothing is read back before `compute`, which returns 0-d float64, nan
before the first update or if nothing was counted.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mpframe.core.errors import DataError
from mpframe.core.tree import host_waits_for, widest


def widen(values: Tensor) -> Tensor:
    """Return values in float64, or in float32 on MPS, which lacks it."""
    return values.to(widest(values.device))


def require_same_shape(metric: str, outputs: Tensor, targets: Tensor) -> None:
    """Refuse tensors that would broadcast against each other unnoticed."""
    if outputs.shape != targets.shape:
        raise DataError(
            f"{metric}: predictions of shape {list(outputs.shape)} against targets of shape "
            f"{list(targets.shape)}; give model and dataset the same shape"
        )


def choose_classes(
    metric: str, outputs: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the classes [N, ...] with the largest logits, and which targets count.

    DataError: there is only one class, or the targets have another shape.
    """
    if outputs.dim() > 1 and outputs.shape[1] == 1:
        raise DataError(
            f"{metric}: outputs of shape {list(outputs.shape)} have one class, which is always the "
            "largest; let the model return two for a binary target, or use a metric of your own"
        )
    chosen = outputs.argmax(dim=1)
    require_same_shape(metric, chosen, targets)
    return chosen, find_labels(metric, targets, ignore_index)


def find_labels(metric: str, targets: Tensor, ignore_index: int) -> Tensor:
    """Return which targets count, bool: all but those equal to `ignore_index`.

    DataError: another one is negative. It is raised on a CPU: a GPU would have to be waited for.
    """
    targets = targets.to(torch.promote_types(targets.dtype, torch.int64))  # -100 is 156 in uint8.
    labels = targets != ignore_index
    if not host_waits_for(targets.device) and (wrong := targets[labels & (targets < 0)]).numel():
        raise DataError(
            f"{metric}: the target {wrong[0].item()} is no class; correct it, or give the metric "
            f"ignore_index={wrong[0].item()}, which leaves it out"
        )
    return labels


class Mean(ABC):
    """The sum over all samples, kept on the device, over their number."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0  # so that the first batch decides the device
        self._seen: Tensor | int = 0

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch, in the shapes that `measure_batch` takes."""
        part, count = self.measure_batch(outputs, targets)
        self._sum = self._sum + part
        self._seen += count

    def merge(self, other: Self) -> None:
        """Add the sum of another rank."""
        self._sum = self._sum + other._sum
        self._seen += other._seen

    def compute(self) -> Tensor:
        """Return the mean so far."""
        return widen(torch.as_tensor(self._sum)) / self._seen

    @abstractmethod
    def measure_batch(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | int]:
        """Return the sum over one batch, and over how many values."""


class LabelMean(Mean):
    """A mean over the labels that are not equal to `ignore_index`."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self._ignored = ignore_index


class Accuracy(LabelMean):
    """The fraction of labels whose logit is the largest, 0 to 1."""

    name = "accuracy"
    higher_is_better = True

    def measure_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Count the hits of logits [N, classes, ...] for class numbers [N, ...]."""
        chosen, labels = choose_classes(self.name, outputs, targets, self._ignored)
        return ((chosen == targets) & labels).sum(), labels.sum()


class Nats(LabelMean):
    """The mean of -ln p(target) over all tokens that count, summed in float64."""

    name = "nats"
    higher_is_better = False

    def measure_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the losses of logits [N, T, vocabulary] for tokens [N, T], int64."""
        require_same_shape(self.name, outputs[..., 0], targets)
        labels = find_labels(self.name, targets, self._ignored)
        logits = outputs.flatten(0, -2).to(torch.promote_types(outputs.dtype, torch.float32))
        losses = cross_entropy(
            logits, targets.flatten(), ignore_index=self._ignored, reduction="none"
        )
        return widen(losses).sum(), labels.sum()


class BitsPerByte(Nats):
    """The bits that the model needs for a byte of text:  mean loss / (ln 2 · bytes per token)."""

    name = "bits_per_byte"

    def __init__(self, bytes_per_token: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
        self._bytes = bytes_per_token

    def compute(self) -> Tensor:
        return super().compute() / (math.log(2) * self._bytes)


class Perplexity(Nats):
    """exp of the mean loss per token: as uncertain as among so many equally likely tokens."""

    name = "perplexity"

    def compute(self) -> Tensor:
        return super().compute().exp()


class RMSE(Mean):
    """The root of the mean squared error, in the targets' unit:  sqrt(1/n Σ (output - target)²)."""

    name = "rmse"
    higher_is_better = False

    def measure_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Sum the squared errors of one batch of predictions in float64."""
        require_same_shape(self.name, outputs, targets)
        errors = self._errors(widen(outputs), widen(targets))
        return errors.square().sum(), targets.numel()

    def compute(self) -> Tensor:
        return super().compute().sqrt()

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets


class RMSPE(RMSE):
    """The root of the mean squared relative error:  sqrt(1/n Σ ((output - target) / target)²).

    It has no unit: 0.1 is an error of ten percent. Outputs and targets are in the target's unit,
    not its logarithm. A target of 0 makes the metric inf or nan.
    """

    name = "rmspe"

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / targets


class Overlap(LabelMean):
    """The mean over the classes of a measure of areas, summed over all pixels of a validation.

    Classes that neither targets nor predictions have are left out, and so is class 0 unless
    `background` is true.
    """

    name: str
    higher_is_better = True

    def __init__(self, background: bool = False, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
        self._first = 0 if background else 1

    def measure_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Count the pixels of logits [N, classes, ...] for class numbers [N, ...] by both."""
        chosen, labels = choose_classes(self.name, outputs, targets, self._ignored)
        classes = outputs.shape[1]
        pairs = (targets.to(torch.int64) * classes + chosen).where(labels, 0).flatten()
        counts = pairs.new_zeros(classes * classes, dtype=torch.int64)
        # Not bincount: on a GPU it waits for the largest value.
        counts.scatter_add_(0, pairs, labels.flatten().to(torch.int64))
        return counts, labels.sum()

    def compute(self) -> Tensor:
        """Return the mean so far, 0 to 1."""
        counts = widen(torch.as_tensor(self._sum)).flatten()
        counts = counts.view(math.isqrt(len(counts)), -1)
        shared, wanted, chosen = counts.diagonal(), counts.sum(1), counts.sum(0)
        values = self.measure(shared, wanted, chosen)[self._first :]
        return values.nanmean()  # 0 / 0 is a class that occurs nowhere.

    @abstractmethod
    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        """Return the measure of each class, nan if its three counts of pixels are 0.

        The counts, float64, are of correct predictions, of targets, and of all predictions.
        """


class Dice(Overlap):
    """2 |A ∩ B| / (|A| + |B|) of the areas A of the targets and B of the predictions."""

    name = "dice"

    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        return 2 * shared / (wanted + chosen)


class IoU(Overlap):
    """|A ∩ B| / |A ∪ B| of the areas A of the targets and B of the predictions."""

    name = "iou"

    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        return shared / (wanted + chosen - shared)
