"""From the backward passes of a step's micro-batches to the gradients and the loss of the step.

LocalWindow         one micro-batch on one rank: the gradients stay where the pass left them
Window              several micro-batches, or several ranks: each is added to fp32 sums
InBackwardWindow    one micro-batch on several ranks, which average while the pass runs
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpframe.core.buffers import Buffers
from mpframe.core.comm import Comm, weighted
from mpframe.core.gradients import as_count
from mpframe.core.loss_scaling.scaler import scale_of
from mpframe.core.objective import NamedObjective, StepOutput, count_of

if TYPE_CHECKING:
    from mpframe.core.trainer import Trainer


class Loss(NamedTuple):
    """The loss of one objective on one micro-batch.

    Attributes:
        name: of the objective.
        value: 0-d, unscaled, detached.
        samples: how many it is the mean of.
        finite: 0-d bool, whether its gradients are; None: nobody has looked.
    """

    name: str
    value: Tensor
    samples: Tensor | int
    finite: Tensor | None = None


Losses = list[Loss]
"""Those of all objectives on one micro-batch."""


class Window:
    """Adds micro-batches to fp32 sums; a bad one is dropped and leaves no trace in the buffers.

    Args:
        trainer: whose step it is.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._comm = trainer.comm
        self._buffers = Buffers(trainer.model)

    def begin(self) -> None:
        """Note the buffers before a micro-batch."""
        self._buffers.save()

    def backward(self, part: NamedObjective, output: StepOutput, batch: Any) -> Loss:
        """Scaled backward pass of one loss."""
        count = count_of(output.count, batch)
        self._comm.backward(output.loss, part.scaler.scale, count, part.parameters)
        return Loss(part.name, output.loss.detach(), count)

    def accumulate(self, optimizer: Any, scaler: Any, losses: Losses) -> Losses:
        """Add the gradients of the micro-batch, and put the buffers back if they are not finite."""
        several = isinstance(scaler, Mapping)
        scale = {n: own.scale for n, own in scaler.items()} if several else scale_of(scaler)
        counts: Any = {loss.name: loss.samples for loss in losses}
        amax = optimizer.accumulate(scale, counts if len(losses) > 1 else losses[0].samples)
        finite = torch.isfinite(amax)
        self._buffers.restore_where(~finite)
        return [loss._replace(finite=finite) for loss in losses]

    def mean(self, batches: Sequence[Losses]) -> tuple[list[Tensor], Tensor | None]:
        """The mean of each loss over the good micro-batches of all ranks.

        Returns:
            The losses, 0-d; and a mask that is true if the step is to be skipped, None if it is not
            known to be.
        """
        self._buffers.broadcast(self._comm)
        return [mean_loss(losses, self._comm) for losses in zip(*batches, strict=True)], None


class LocalWindow(Window):
    """One micro-batch on one rank: `optimizer.step` takes its gradients from the parameters."""

    def begin(self) -> None:
        """The buffers are put back with the step."""

    def backward(self, part: NamedObjective, output: StepOutput, batch: Any) -> Loss:
        """Scaled backward pass of one loss."""
        loss = output.loss
        loss.backward(part.scaler.scale.clone(), inputs=part.parameters)  # type: ignore[no-untyped-call]
        return Loss(part.name, loss.detach(), 1 if output.count is None else output.count)

    def accumulate(self, optimizer: Any, scaler: Any, losses: Losses) -> Losses:
        """Leave the gradients where they are."""
        return losses

    def mean(self, batches: Sequence[Losses]) -> tuple[list[Tensor], Tensor | None]:
        """The losses themselves; the mean over nothing is no step."""
        values = []
        for loss in batches[0]:
            values.append(loss.value)
        if len(values) > 1 or not (isinstance(loss.samples, Tensor) or loss.samples == 0):
            return values, None
        return values, as_count(loss.samples, loss.value.device) == 0


class InBackwardWindow(Window):
    """One micro-batch on several ranks, which average their gradients while the pass runs."""

    def __init__(self, trainer: "Trainer", ranks: Any) -> None:
        super().__init__(trainer)
        self._optimizer, self._ranks = trainer.optimizer, ranks

    def begin(self) -> None:
        """The buffers are put back with the step."""

    def backward(self, part: NamedObjective, output: StepOutput, batch: Any) -> Loss:
        """Scaled backward pass of the loss; gradients are sent meanwhile."""
        loss, count = output.loss, count_of(output.count, batch)
        samples = as_count(count, loss.device)
        self._ranks.backward(loss, scale_of(part.scaler), samples, self._optimizer.parameters)
        return Loss(part.name, loss.detach(), count)

    def accumulate(self, optimizer: Any, scaler: Any, losses: Losses) -> Losses:
        """Give the optimizer the means, and all ranks the loss and the buffers of rank 0."""
        end_broadcast = self._buffers.start_broadcast(self._comm)  # While gradients are sent.
        means, amax, before, loss = self._ranks.means(losses[0].value)
        end_broadcast()
        optimizer.keep_means(means, amax, before)
        return [losses[0]._replace(value=loss)]

    def mean(self, batches: Sequence[Losses]) -> tuple[list[Tensor], Tensor | None]:
        """The loss that the ranks have averaged already."""
        return [batches[0][0].value], None


def mean_loss(losses: Sequence[Loss], comm: Comm) -> Tensor:
    """The mean over the samples of all ranks, 0-d; of several losses without the dropped ones."""
    values = torch.stack([loss.value for loss in losses])
    counts = torch.stack([as_count(loss.samples, values.device) for loss in losses])
    if len(losses) > 1:  # A single one is as good as the step.
        finite = torch.stack([loss.finite for loss in losses if loss.finite is not None])
        values = torch.where(finite, values, torch.nan)
        counts = torch.where(values.isnan(), 0.0, counts)
    weights = (counts / counts.max()).float()  # exactly 1 where all are equal
    mean = weighted(values, weights).sum() / weights.sum()
    return comm.mean(weighted(mean, comm.weight(counts.sum())))
