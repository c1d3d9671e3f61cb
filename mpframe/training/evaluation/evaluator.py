"""Evaluates the model of a trainer: the loss per sample and the metrics over one pass."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpframe.distributed.world import weighted
from mpframe.objectives import StepOutput, compute, count_of
from mpframe.optim import fp32_weights
from mpframe.optim.gradients import as_count
from mpframe.precision import Precision
from mpframe.training.callback import call
from mpframe.training.evaluation.evaluation import Evaluation, Metrics
from mpframe.training.loader import Batch, Loader
from mpframe.tree import device_of
from mpframe.user_code import InBatch

if TYPE_CHECKING:
    from mpframe.training.trainer import Trainer


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models.

    Attributes:
        metrics: what makes each metric, by name; see `evaluation.NamedMetric`.
        monitor: the name of the metric that tells progress, or `loss`; None: the first metric.
        precision: the mode to evaluate in, over fp32 weights; None: as trained.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    monitor: str | None = None
    precision: Precision | None = None

    def attach(self, model: nn.Module) -> None:
        """Let the mode know the model that will be evaluated."""
        if self.precision is not None:
            self.precision.attach(model)

    @torch.no_grad()
    def __call__(self, trainer: "Trainer", loader: Loader, split: str) -> Evaluation:
        """The mean loss per sample and the metrics over one pass; the model is left as it was.

        Each batch's loss counts as often as its objective says (`StepOutput.count`). Of several
        losses it is their sum; the count, and what the metrics see, are those of the first.

        Args:
            trainer: its model and objectives.
            loader: the samples.
            split: what they are for, in messages.
        """
        device = device_of(trainer.model)
        metrics = Metrics(self.metrics, self.monitor, device, trainer.world)
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with self._weights(trainer), _mode_restored(trainer.model):
            trainer.model.eval()
            for number, batch in enumerate(loader.epoch(0)):
                call(trainer.callbacks, "on_prediction_step", trainer)
                with InBatch(split, 0, number, loader=loader):
                    sums += self._evaluate_batch(trainer, batch, metrics)
        return metrics.evaluation(sums)

    def _evaluate_batch(self, trainer: "Trainer", batch: Batch | None, metrics: Metrics) -> Tensor:
        """The losses times the samples that they are the mean of, and the samples: [2] float64.

        They are those of this rank's part of a batch, None if that is empty.
        """
        device, missing = device_of(trainer.model), batch is None
        batch = trainer.world.lend(batch)  # A rank without samples gathers weights with the others.
        computed = [] if batch is None else self._compute(trainer, batch)
        if missing or not computed:
            metrics.update(None)
            return torch.zeros(2, dtype=torch.float64, device=device)
        first = computed[0]
        metrics.update((first.outputs, first.targets))
        count = as_count(count_of(first.count, batch), device)
        losses = [weighted(output.loss.double(), count) for output in computed]
        return torch.stack([torch.stack(losses).sum(), count])

    def _compute(self, trainer: "Trainer", batch: Batch) -> list[StepOutput]:
        batch, precision = trainer.on_device(batch), self.precision or trainer.precision
        model = trainer.compiled_model if self.precision is None else trainer.model
        with precision.cast():
            return [compute(part.objective, model, batch) for part in trainer.objectives]

    @contextmanager
    def _weights(self, trainer: "Trainer") -> Iterator[None]:
        """Within the block the weights are fp32 where there is a mode, and the algorithms'."""
        with ExitStack() as stack:
            if self.precision is not None:
                stack.enter_context(fp32_weights(trainer.model))
            for algorithm in trainer.algorithms.values():
                stack.enter_context(algorithm.evaluating(trainer))
            yield


@contextmanager
def _mode_restored(model: nn.Module) -> Iterator[None]:
    training = model.training
    try:
        yield
    finally:
        model.train(training)
