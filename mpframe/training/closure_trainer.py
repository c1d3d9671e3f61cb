"""The trainer of optimizers that evaluate the loss themselves, such as LBFGS."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpframe.core.callback import Batch
from mpframe.core.closure import refuse_beside_closure
from mpframe.core.errors import ConfigError
from mpframe.core.master_weights import MasterWeights
from mpframe.core.objective import require_objective
from mpframe.core.step_result import StepResult
from mpframe.core.user_code import name_of
from mpframe.training.loss_spike import spikes_of
from mpframe.training.trainer import Trainer


@dataclass
class ClosureTrainer(Trainer):
    """A `Trainer` whose optimizer takes a closure; see core/closure.py for what goes with one.

    Raises:
        ConfigError: half weights, casts, a scaler, clipping, accumulation or skipping beside it.
    """

    def train_step(self, *batches: Batch) -> StepResult:
        """One step on one batch; the optimizer evaluates the loss as often as it likes."""
        batch = self.on_device(*batches)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            return self.forward_backward(self.objectives[0], batch).value

        optimizer: Any = self.optimizer
        result: StepResult = optimizer.step(closure=closure)
        if result.loss is not None:
            for algorithm in self.algorithms.values():  # No such step is skipped.
                algorithm.before_update(self, [result.loss])
        return self.finish_step(result)

    def check_fit(self) -> None:
        """Raise ConfigError if anything is used that does not go with a closure."""
        require_objective("objective", self.objective)
        if self.comm.size > 1:
            optimizer = name_of(getattr(self.optimizer, "optimizer", self.optimizer))
            raise ConfigError(
                f"trainer.parallel=ddp: optimizer={optimizer} evaluates "
                "the loss itself, and each rank would go its own way; use one process"
            )
        spikes = spikes_of(self)
        if isinstance(self.optimizer, MasterWeights):
            refuse_beside_closure(
                self.optimizer.optimizer,
                half=self.precision.policy.mode == "mixed",
                cast=self.precision.policy.casts,
                scaled=bool(self.scalers),
                clipped=(self.plan.clip_norm or self.plan.clip_value) is not None,
                accumulated=self.plan.accumulate > 1,
                masked=spikes is not None and spikes.policy != "warn",
            )
