"""Validation: the loss per sample and the metrics over one pass, and the best pass so far.

`Evaluator` runs a trainer's model over the data, with averaged weights if there are any, and
`Metrics` measures its outputs. `Best` remembers the best validation of a run.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from mpframe.checkpoint.folder import rank
from mpframe.core.callback import Batch
from mpframe.core.comm import Comm, Count, apply_weight
from mpframe.core.errors import UserCodeError
from mpframe.core.optim.gradients import as_count
from mpframe.core.tree import device_of, map_tensors, widest
from mpframe.core.user_code import name_of, user_code
from mpframe.training.trainer import Loader, Trainer, in_batch, run_callbacks

LOSS = "loss"
"""The word for the validation loss in `monitor`, and no metric's name."""


@dataclass(frozen=True)
class Evaluation:
    """One validation."""

    loss: float  # mean per sample
    metrics: Mapping[str, float] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)  # of each metric
    monitor: str = LOSS  # the metric that measures progress, or `loss`

    @property
    def value(self) -> float:
        """The value of the monitored metric, or the loss."""
        return self.loss if self.monitor == LOSS else self.metrics[self.monitor]

    @property
    def watched(self) -> float:
        """The monitored metric if it has a direction, else the loss."""
        return self.loss if self.direction(self.monitor) is None else self.value

    def direction(self, name: str) -> bool | None:
        """Whether higher is better, for a metric or `loss`, or None for a metric without one."""
        return False if name == LOSS else self.higher_is_better.get(name)


class NamedMetric:
    """A user's metric over one validation. Raises UserCodeError if its code does.

    `code` makes a new metric, or is one with `reset()` that is used again (torchmetrics).
    """

    def __init__(self, name: str, code: Any, device: torch.device | None = None) -> None:
        self._option = f"metrics.{name}:"
        with user_code(self._option, code):
            again = hasattr(code, "reset") and not isinstance(code, type)
            self._metric: Any = code if again else code()
            if again:
                code.reset()
            if device is not None and hasattr(self._metric, "to"):
                self._metric = self._metric.to(device)
        for method in ("update", "compute"):
            if not callable(getattr(self._metric, method, None)):
                raise UserCodeError(
                    f"{self._option} {name_of(self._metric)} has no {method}(); a metric has "
                    "update(outputs, targets) and compute()"
                )
        if getattr(self._metric, "sync_on_compute", False):
            self._metric.sync_on_compute = False  # torchmetrics' would ask ranks that do not.
        self.name, self._device = name, device
        self.merges = _merges(self._metric)
        self.higher_is_better: bool | None = getattr(self._metric, "higher_is_better", None)

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch. UserCodeError if the objective gave no outputs to measure."""
        if outputs is None:
            raise UserCodeError(
                f"objective: gave no outputs, and the metric {self.name} measures them; let it "
                "return StepOutput(loss, outputs, targets)"
            )
        with user_code(self._option, self._metric, outputs=outputs, targets=targets):
            self._metric.update(outputs, targets)

    def merge(self, comm: Comm) -> None:
        """Add, on rank 0, the measurements of the other ranks."""
        if comm.size == 1:
            return
        measured = map_tensors(lambda tensor: tensor.cpu(), vars(self._metric))
        for state in comm.gather_object(measured)[comm.tensor :: comm.tensor]:
            other = copy(self._metric)
            vars(other).update(map_tensors(lambda tensor: tensor.to(self._device), state))
            with user_code(self._option, self._metric):
                self._metric.merge(other)

    def compute(self) -> float:
        """Return the value over all batches. UserCodeError if it is not one number."""
        with user_code(self._option, self._metric):
            return float(self._metric.compute())


class Metrics:
    """The metrics of one validation, over the parts of all ranks.

    Each rank measures its part with a metric that has `merge(other)`, which adds another rank's
    measurements. Other metrics run on rank 0, which receives every rank's outputs batch by batch,
    in the order of the samples.
    """

    def __init__(
        self, codes: Mapping[str, Any], monitor: str | None, device: torch.device, comm: Comm
    ) -> None:
        self._metrics = [NamedMetric(name, code, device) for name, code in codes.items()]
        self._monitor = next(iter(codes), LOSS) if monitor is None else monitor
        self._device, self._comm = device, comm
        self._sent = [metric for metric in self._metrics if comm.size > 1 and not metric.merges]

    def update(self, part: tuple[Any, Any] | None) -> None:
        """Add one batch: its outputs and targets on this rank, or None without samples."""
        for metric in self._metrics:
            if part is not None and metric not in self._sent:
                metric.update(*part)
        if not self._sent:
            return
        on_host = map_tensors(lambda tensor: tensor.cpu(), part)
        for theirs in self._comm.gather_object(on_host)[:: self._comm.tensor]:
            if theirs is not None:
                outputs, targets = map_tensors(lambda tensor: tensor.to(self._device), theirs)
                for metric in self._sent:
                    metric.update(outputs, targets)

    def evaluation(self, sums: Tensor) -> Evaluation:
        """Return the result, the same on all ranks.

        `sums` are of this rank's losses, each times its count, and of the counts: [2].
        """
        self._comm.sum_([sums])
        total, count = sums.tolist()
        for metric in self._metrics:
            if metric not in self._sent:
                metric.merge(self._comm)
        evaluation = None
        if self._comm.is_main:
            evaluation = Evaluation(
                total / count if count else math.nan,
                {metric.name: metric.compute() for metric in self._metrics},
                {metric.name: metric.higher_is_better for metric in self._metrics},
                self._monitor,
            )
        return self._comm.broadcast_object(evaluation)  # type: ignore[no-any-return]


def _merges(metric: Any) -> bool:
    """Return whether `merge` adds all that `update` measures: it is not from further up."""
    for kind in type(metric).__mro__:
        if "merge" in vars(kind) or "update" in vars(kind):
            return callable(vars(kind).get("merge"))
    return callable(getattr(metric, "merge", None))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a trainer's model."""

    metrics: Mapping[str, Any] = field(default_factory=dict)  # by name, see `NamedMetric`
    monitor: str | None = None  # the metric that measures progress, or `loss`. None: the first

    @torch.no_grad()
    def __call__(self, trainer: Trainer, loader: Loader, split: str) -> Evaluation:
        """Return the loss per sample and the metrics over one pass. The model stays as it was.

        Each batch's loss counts as often as its objective says (`StepOutput.count`). With several
        losses it is their sum, and count and metric inputs come from the first.
        """
        device = device_of(trainer.model)
        metrics = Metrics(self.metrics, self.monitor, device, trainer.comm)
        sums = torch.zeros(2, dtype=widest(device), device=device)
        with ExitStack() as stack:
            for algorithm in trainer.algorithms.values():
                stack.enter_context(algorithm.evaluating(trainer))
            for module in trainer.model.modules():  # Some may be in eval mode while others train.
                stack.callback(setattr, module, "training", module.training)
            stack.callback(trainer.model.train, trainer.model.training)
            trainer.model.eval()
            for number, batch in enumerate(loader.epoch(0)):
                run_callbacks(trainer.callbacks, "on_prediction_step", trainer)
                with in_batch(split, 0, number, loader):
                    self._evaluate_batch(trainer, number, batch, metrics, sums)
        return metrics.evaluation(sums)

    def _evaluate_batch(
        self, trainer: Trainer, number: int, batch: Batch | None, metrics: Metrics, sums: Tensor
    ) -> None:
        """Add to `sums`, [2], this rank's losses times their counts, and the counts."""
        model = trainer.compiled_model
        shown, computed = _batch_of_any(trainer.comm, batch), []
        if shown is not None:
            shown = trainer.on_device(shown)
            with trainer.precision.cast():
                computed = [part(model, shown) for part in trainer.objectives]
        if batch is None:
            metrics.update(None)
            return
        first = computed[0]
        metrics.update((first.outputs, first.targets))
        run_callbacks(trainer.callbacks, "on_prediction_end", trainer, number, batch, first)
        count = as_count(cast(Count, first.count), sums.device)
        losses = [apply_weight(output.loss.to(count.dtype), count) for output in computed]
        sums += torch.stack([torch.stack(losses).sum(), count])


def _batch_of_any(comm: Comm, batch: Batch | None) -> Batch | None:
    """Return the batch, or another rank's if this rank has none and gathers sharded weights."""
    if comm.sharding is None or not comm.any(batch is None):
        return batch
    present = [one for one in comm.gather_object(batch) if one is not None]
    other: Batch | None = comm.broadcast_object(present[0] if present else None)
    return other if batch is None else batch


@dataclass
class Best:
    """The best value of one metric or of `loss`, and the `global_step` of its validation."""

    name: str = ""
    value: float | None = None
    step: int | None = None

    def offer(
        self, name: str, value: float, step: int, higher_is_better: bool, by: float = 0.0
    ) -> bool:
        """Take a finite value if it is better by more than `by`, and return whether it was.

        A value of another metric than before begins again.
        """
        if name != self.name:
            self.name, self.value, self.step = name, None, None
        offered = rank(value, higher_is_better)
        known = None if self.value is None else rank(self.value, higher_is_better)
        if offered is None or (known is not None and not known - offered > by):
            return False
        self.value, self.step = value, step
        return True

    def __str__(self) -> str:
        return "nan" if self.value is None else f"{self.value:g} (step {self.step})"
