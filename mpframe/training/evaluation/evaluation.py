"""The result of a validation, its metrics, and the fp32 weights that it may use."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.optim import MasterWeights, MultiOptimizer
from mpframe.tree import HALF
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
        self.name = name
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
    """The metrics of one validation.

    Args:
        codes: what makes each, by name, as `NamedMetric` takes it.
        monitor: the name of the one that tells progress, or `loss`; None: the first one.
        device: where they compute.
    """

    def __init__(self, codes: Mapping[str, Any], monitor: str | None, device: torch.device) -> None:
        self._metrics = [NamedMetric(name, code, device) for name, code in codes.items()]
        self._monitor = next(iter(codes), LOSS) if monitor is None else monitor

    def update(self, outputs: Any, targets: Any) -> None:
        """Give each metric one batch."""
        for metric in self._metrics:
            metric.update(outputs, targets)

    def evaluation(self, loss: float) -> Evaluation:
        """The result of the validation, with its loss."""
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


@contextmanager
def fp32_weights(
    optimizer: MasterWeights | MultiOptimizer, model: nn.Module, but: Container[nn.Parameter] = ()
) -> Iterator[None]:
    """Within the block half weights are replaced by copies of their fp32 masters, except `but`."""
    half = {p: p.data for p in model.parameters() if p.dtype in HALF and p not in but}
    try:
        for parameter in half:
            parameter.data = optimizer.master_of(parameter).detach().float().clone()
        yield
    finally:
        for parameter, weight in half.items():
            parameter.data = weight
