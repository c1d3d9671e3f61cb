"""The trainer of several losses, each with its own optimizer, as a GAN's are.

    skip="each"    the losses take turns in their order: the second is computed with the weights
                   that the first one's update left, as a generator's after its discriminator's
    skip="all"     all losses are computed with the same weights before any optimizer steps,
                   because no part may move before the verdicts on all losses are known

A loss reaches only its own part: a generator's loss runs through the discriminator and leaves no
gradient there.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mpframe.core.callback import Batch
from mpframe.core.comm import Loss
from mpframe.core.errors import ConfigError
from mpframe.core.objective import NamedObjective, Objective, require_objective
from mpframe.core.step_result import StepResult
from mpframe.training.callbacks.guards import spikes_of
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer, largest, merge_results
from mpframe.training.trainer import Trainer


@dataclass
class MultiObjectiveTrainer(Trainer):
    """A `Trainer` of several objectives, by name, in the order in which they take turns.

    The optimizer has a part for each, and the scaler is one for all, or one for each, by name.
    ConfigError: names of objectives and optimizers do not match, or spikes are judged.
    """

    optimizer: MultiOptimizer
    objective: Mapping[str, Objective]  # type: ignore[assignment]

    @property
    def objectives(self) -> list[NamedObjective]:
        """A step's losses, in order, each with its scaler and the parameters it trains."""
        scaler: Any = self.scaler
        each, parts = isinstance(scaler, Mapping), self.optimizer.parts
        return [
            NamedObjective(name, one, scaler[name] if each else scaler, parts[name].parameters)
            for name, one in self.objective.items()
        ]

    def forward_backward(self, part: NamedObjective, batch: Batch) -> Loss:
        sharding = self.comm.sharding
        with sharding.train_only(part.parameters) if sharding else nullcontext():
            return super().forward_backward(part, batch)

    def train_step(self, *batches: Batch) -> StepResult:
        single = len(batches) == len(self.objective) == 1
        self.comm.begin_step(self.optimizer, self.plan.reduce if single else "after_backward")
        take = self._take_turns if self.optimizer.skip == "each" else self._step_together
        return self.finish_step(take(batches))

    def _take_turns(self, batches: Sequence[Batch]) -> StepResult:
        """Make each loss and its optimizer's step, one after the other."""
        shared, amaxes, results = self.scalers.get(""), list[Tensor](), {}
        turn: Any = SimpleNamespace(scale=shared.scale, update=amaxes.append) if shared else None
        for part in self.objectives:
            optimizer = self.optimizer.parts[part.name]
            losses = self.accumulate_losses(optimizer, [part], batches)
            result = self.update(optimizer, turn or part.scaler, losses)
            results[part.name] = replace(result, loss=losses[0])
        if shared:  # It is told once, so that all turns have one scale.
            shared.update(largest(amaxes))
        return merge_results(results)

    def _step_together(self, batches: Sequence[Batch]) -> StepResult:
        """Compute all losses with the same weights, then step all optimizers."""
        losses = self.accumulate_losses(self.optimizer, self.objectives, batches)
        result = self.update(self.optimizer, self.scaler, losses)
        parts = zip(result.each().items(), losses, strict=True)
        return merge_results({name: replace(part, loss=loss) for (name, part), loss in parts})

    def check_fit(self) -> None:
        """Raise ConfigError unless each loss has its optimizer, and none is judged for spikes."""
        for name, objective in self.objective.items():
            require_objective(f"objective.{name}", objective)
        parts = self.optimizer.parts if isinstance(self.optimizer, MultiOptimizer) else {}
        if list(parts) != list(self.objective) or not self.optimizer.own_losses:
            raise ConfigError(
                f"optimizer.parts={', '.join(parts) or 'none'}: the losses are "
                f"{', '.join(self.objective)}; give each an optimizer by its name, in this order"
            )
        spikes = spikes_of(self)
        if spikes is not None:
            raise ConfigError(
                f"callbacks.loss_spikes.policy={spikes.policy}: judges one loss, and the dataset "
                f"has {len(self.objective)}; use callbacks.loss_spikes.policy=off"
            )
