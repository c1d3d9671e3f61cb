"""The trainer of several losses, each lowered by an optimizer of its own, as a GAN's are.

    skip="each"    the losses take turns in their order: the second is computed with the weights
                   that the first one's update left, as a generator's after its discriminator's
    skip="all"     all losses are computed with the same weights before any optimizer steps,
                   because no part may move before the verdicts on all losses are known

A loss reaches the parameters of its own part alone: a generator's loss runs through the
discriminator and leaves no gradient there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpframe.errors import ConfigError
from mpframe.loss_scaling.interface import LossScaler, scale_of
from mpframe.objectives import Objective, count_of, require_objective
from mpframe.optim.multi_optimizer import MultiOptimizer, joined
from mpframe.optim.step_result import StepResult, largest
from mpframe.training.buffers import Buffers
from mpframe.training.loader import Batch
from mpframe.training.named_objective import NamedObjective
from mpframe.training.trainer import Trainer, weighted_loss
from mpframe.user_code import UserCode


@dataclass
class MultiObjectiveTrainer(Trainer):
    """A `Trainer` with several objectives.

    Attributes:
        optimizer: a `MultiOptimizer` with a part for each objective, by the same name.
        objective: by name, in the order in which they take turns.
        scaler: one that all share, one for each by name, or None.

    Raises:
        ConfigError: names of objectives, optimizers and scalers do not match, or spikes are judged.
    """

    objective: Mapping[str, Objective]  # type: ignore[assignment]

    @property
    def objectives(self) -> list[NamedObjective]:
        """Every loss of a step, in their order, with its scaler and the parameters it moves."""
        return [
            NamedObjective(name, own, _of(self.scaler, name), self._parts.parts[name].parameters)
            for name, own in self.objective.items()
        ]

    @property
    def _parts(self) -> MultiOptimizer:
        optimizer: Any = self.optimizer
        return optimizer  # type: ignore[no-any-return]

    def train_step(self, *batches: Batch) -> StepResult:
        """One step of every optimizer on one batch, or on the micro-batches of a window."""
        take = self._take_turns if self._parts.skip == "each" else self._step_together
        result = take(batches)
        self._advance(result)
        return result

    def _take_turns(self, batches: Sequence[Batch]) -> StepResult:
        """Each loss and its optimizer's step, one after the other."""
        shared = None if isinstance(self.scaler, Mapping) else _SharedScaler(self.scaler)
        results = {}
        for own in self.objectives:
            optimizer = self._parts.parts[own.name]
            scaler = own.scaler if shared is None or own.scaler is None else shared
            result, losses = self._update([own], optimizer, scaler, batches)
            results[own.name] = replace(result, loss=losses[0])
        if shared is not None:
            shared.flush()
        return joined(results)

    def _step_together(self, batches: Sequence[Batch]) -> StepResult:
        """All losses with the same weights, then one step of all optimizers."""
        result, losses = self._update(self.objectives, self._parts, self.scaler, batches)
        parts = zip(result.each().items(), losses, strict=True)
        return joined({name: replace(part, loss=loss) for (name, part), loss in parts})

    def _update(
        self,
        objectives: Sequence[NamedObjective],
        optimizer: Any,
        scaler: Any,
        batches: Sequence[Batch],
    ) -> tuple[StepResult, list[Tensor]]:
        """Forward and backward of some losses on all micro-batches, and the step they lead to."""
        optimizer.zero_grad()
        self._buffers.save()
        if len(batches) == 1 and self.world.size == 1:
            losses = [loss for loss, _ in self._forward_backward_all(objectives, batches[0])]
        else:
            losses = self._accumulate_all(objectives, optimizer, scaler, batches)
        if self._unread and self._schedules:
            self.read_verdicts()  # These need the verdict on the step before.
        with UserCode("optimizer:", getattr(optimizer, "optimizer", optimizer)):
            result: StepResult = optimizer.step(
                scaler,
                max_norm=self.plan.clip_norm,
                max_value=self.plan.clip_value,
                skip_if_dropped=self.plan.skip_if_dropped,
            )
        self._buffers.restore_where(result.any_skipped())
        self._buffers.broadcast(self.world)
        return result, losses

    def _forward_backward_all(
        self, objectives: Sequence[NamedObjective], batch: Batch
    ) -> list[tuple[Tensor, Tensor | int]]:
        """Forward and scaled backward of each loss; the unscaled losses, detached, with counts."""
        batch, losses = self._on_device(batch), []
        for own in objectives:
            loss, count = self._forward(own.objective, batch)
            scaled = loss if own.scaler is None else loss * own.scaler.scale
            with UserCode("model: the backward pass of", self.model):
                scaled.backward(inputs=own.parameters)  # type: ignore[no-untyped-call]
            losses.append((loss.detach(), count_of(count, batch)))
        return losses

    def _accumulate_all(
        self,
        objectives: Sequence[NamedObjective],
        optimizer: Any,
        scaler: Any,
        batches: Sequence[Batch],
    ) -> list[Tensor]:
        """The mean of each loss over the micro-batches that were not dropped."""
        each = isinstance(scaler, Mapping)
        scale = {n: own.scale for n, own in scaler.items()} if each else scale_of(scaler)
        buffers, rows = Buffers(self.model), []
        for batch in batches:
            buffers.save()
            losses = self._forward_backward_all(objectives, batch)
            counts = {part.name: n for part, (_, n) in zip(objectives, losses, strict=True)}
            amax = optimizer.accumulate(scale, counts if len(losses) > 1 else losses[0][1])
            good = torch.isfinite(amax)
            buffers.restore_where(~good)
            good |= len(batches) == 1
            rows.append([(torch.where(good, loss, torch.nan), count) for loss, count in losses])
        return [weighted_loss(own, self.world) for own in zip(*rows, strict=True)]

    def _refuse_misfits(self) -> None:
        names = ", ".join(self.objective)
        for name, own in self.objective.items():
            require_objective(f"objective.{name}", own)
        parts = self.optimizer.parts if isinstance(self.optimizer, MultiOptimizer) else {}
        if list(parts) != list(self.objective) or not self.optimizer.own_losses:  # type: ignore[union-attr]
            raise ConfigError(
                f"optimizer.parts={', '.join(parts) or 'none'}: the losses are {names}; give each "
                "an optimizer by its name, in this order"
            )
        if isinstance(self.scaler, Mapping) and list(self.scaler) != list(self.objective):
            raise ConfigError(
                f"loss_scaling: scalers for {', '.join(self.scaler)}; the losses are {names}"
            )
        if self.plan.reduce == "in_backward_half":
            raise ConfigError(
                f"trainer.reduce={self.plan.reduce}: goes with one loss, and the dataset has "
                f"{len(self.objective)}; use trainer.reduce=after_backward"
            )
        if self.spikes is not None:
            raise ConfigError(
                f"trainer.on_loss_spike={self.spikes.policy}: judges one loss, and the dataset has "
                f"{len(self.objective)}; use trainer.on_loss_spike=off"
            )


class _SharedScaler:
    """A scaler that several turns share: updated once a step, with the largest amax of all turns.

    So its scale is the same in all turns of a step.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler
        self._amaxes: list[Tensor] = []

    @property
    def scale(self) -> Tensor | float:
        """The present scale."""
        return scale_of(self._scaler)

    def update(self, amax: Tensor) -> None:
        """Keep the amax of a turn."""
        self._amaxes.append(amax)

    def flush(self) -> None:
        """All turns of the step are over: tell the scaler."""
        if self._scaler is not None:
            self._scaler.update(largest(self._amaxes))


def _of(given: Any, name: str) -> Any:
    """What is given for a loss: its entry of a mapping, or the one thing given for all."""
    return given[name] if isinstance(given, Mapping) else given
