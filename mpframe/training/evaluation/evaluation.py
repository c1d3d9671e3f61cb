"""The result of a validation, its metrics, and the fp32 weights that it may use."""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mpframe.distributed.world import ALONE, World
from mpframe.errors import UserCodeError
from mpframe.tree import map_tensors
from mpframe.user_code import UserCode, described, name_of

LOSS = "loss"
"""The word for the validation loss in `monitor`; no metric has this name."""


@dataclass(frozen=True)
class Evaluation:
    """One validation: the mean loss per sample, and the metrics by name.

    Attributes:
        loss: mean loss per sample.
        metrics: the value of each metric.
        higher_is_better: the direction of each metric; None if the metric has none.
        monitor: the name of the metric that tells progress, or `loss`.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)
    monitor: str = LOSS

    @property
    def value(self) -> float:
        """The value of the monitored metric, or the loss."""
        return self.loss if self.monitor == LOSS else self.metrics[self.monitor]

    @property
    def watched(self) -> float:
        """What shows progress: the monitored metric if it has a direction, else the loss."""
        return self.loss if self.direction(self.monitor) is None else self.value

    def direction(self, name: str) -> bool | None:
        """Whether higher is better, for a metric or `loss`; None if a metric has no direction."""
        return False if name == LOSS else self.higher_is_better.get(name)


class NamedMetric:
    """A user's metric over one validation: `update(outputs, targets)`, then `compute()`.

    Args:
        name: the metric's.
        code: makes a new metric; or a metric with `reset()`, as torchmetrics', which is used again.
        device: where the metric computes, if it can be moved.

    Attributes:
        name: the metric's.
        merges: whether it has `merge(other)`, which takes in what another one has measured.
        higher_is_better: None if it has no direction.

    Raises:
        UserCodeError: the metric cannot be made, or is none; here and below: its code raised.
    """

    def __init__(self, name: str, code: Any, device: torch.device | None = None) -> None:
        self._option = f"metrics.{name}:"
        with UserCode(self._option, code):
            self._metric: Any = _fresh(code)
            if device is not None and hasattr(self._metric, "to"):
                self._metric = self._metric.to(device)
        for method in ("update", "compute"):
            if not callable(getattr(self._metric, method, None)):
                raise UserCodeError(
                    f"{self._option} {name_of(self._metric)} has no {method}(); a metric has "
                    "update(outputs, targets) and compute()"
                )
        if getattr(self._metric, "sync_on_compute", False):
            # torchmetrics' would ask the other ranks, which do not compute it.
            self._metric.sync_on_compute = False
        self.name, self._device = name, device
        self.merges = callable(getattr(self._metric, "merge", None))
        self.higher_is_better: bool | None = getattr(self._metric, "higher_is_better", None)

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
        with UserCode(self._option, self._metric, outputs=outputs, targets=targets):
            self._metric.update(outputs, targets)

    def merge(self, world: World) -> None:
        """On rank 0, take in what the metrics of the other ranks have measured."""
        if world.size == 1:
            return
        measured = map_tensors(lambda tensor: tensor.cpu(), vars(self._metric))
        for state in world.gather_object(measured)[1:]:
            other = copy(self._metric)
            vars(other).update(map_tensors(lambda tensor: tensor.to(self._device), state))
            with UserCode(self._option, self._metric):
                self._metric.merge(other)

    def compute(self) -> float:
        """The value over all batches.

        Raises:
            UserCodeError: it is not one number.
        """
        with UserCode(self._option, self._metric):
            value = self._metric.compute()
        one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not one:
            raise UserCodeError(
                f"{self._option} {name_of(self._metric)} gave {described(value)} as its value; "
                "it must be one number"
            )
        return float(value)


class Metrics:
    """The metrics of one validation, over the parts of all ranks.

    Each rank measures its own part with a metric that has `merge`. Of any other rank 0 measures the
    parts of all, sent to it batch by batch, in the order of the samples.

    Args:
        codes: what makes each, by name, as `NamedMetric` takes it.
        monitor: the name of the one that tells progress, or `loss`; None: the first one.
        device: where they compute.
        world: the ranks that validate together.
    """

    def __init__(
        self,
        codes: Mapping[str, Any],
        monitor: str | None,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        self._metrics = [NamedMetric(name, code, device) for name, code in codes.items()]
        self._monitor = next(iter(codes), LOSS) if monitor is None else monitor
        self._device, self._world = device, world
        self._sent = [own for own in self._metrics if world.size > 1 and not own.merges]

    def update(self, part: tuple[Any, Any] | None) -> None:
        """Take in one batch.

        Args:
            part: its outputs and targets on this rank; None if it has none of its samples.
        """
        for metric in self._metrics:
            if part is not None and metric not in self._sent:
                metric.update(*part)
        if self._sent:
            self._update_with_all(part)

    def evaluation(self, sums: Tensor) -> Evaluation:
        """The result of the validation, the same on all ranks.

        Args:
            sums: of this rank's losses, each times its count, and of the counts: [2] float64.
        """
        self._world.sum_([sums])
        total, count = sums.tolist()
        for metric in self._metrics:
            if metric not in self._sent:
                metric.merge(self._world)
        own = self._result(total / count if count else math.nan) if self._world.is_main else None
        evaluation: Evaluation = self._world.broadcast_object(own)
        return evaluation

    def _update_with_all(self, part: tuple[Any, Any] | None) -> None:
        on_host = map_tensors(lambda tensor: tensor.cpu(), part)
        for own in self._world.gather_object(on_host):
            if own is not None:
                outputs, targets = map_tensors(lambda tensor: tensor.to(self._device), own)
                for metric in self._sent:
                    metric.update(outputs, targets)

    def _result(self, loss: float) -> Evaluation:
        return Evaluation(
            loss,
            {metric.name: metric.compute() for metric in self._metrics},
            {metric.name: metric.higher_is_better for metric in self._metrics},
            self._monitor,
        )


def _fresh(code: Any) -> Any:
    if isinstance(code, type) or not hasattr(code, "reset"):
        return code()
    code.reset()
    return code
