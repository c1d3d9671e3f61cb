"""Optimizers that evaluate the loss themselves, such as LBFGS: their step, and their trainer.

They try points and go back, so their step cannot be taken or skipped as a whole. The losses that
they compare must not be rounded: fp32 weights, no loss scaling, no clipping. torch's other
optimizers only run a closure before they step: `MasterWeights.step` does that for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.core.gradients import measure_grads
from mpframe.core.master_weights import MasterWeights, evaluate
from mpframe.core.objective import require_objective
from mpframe.core.step_result import StepResult, Verdict
from mpframe.core.tree import HALF
from mpframe.core.user_code import name_of
from mpframe.training.loss_spike import spikes_of
from mpframe.training.trainer import Trainer


def step_with_closure(masters: MasterWeights, closure: Callable[[], Any]) -> StepResult:
    """Make the step of an optimizer that evaluates the loss itself. No such step is ever skipped.

    Args:
        masters: the optimizer, as `Precision.prepare` returns it.
        closure: computes the loss and calls backward; called as often as the optimizer likes.

    Returns:
        The loss is the optimizer's; amax and norm are of the last evaluation's gradients.

    Raises:
        ConfigError: there are half weights.
    """
    parameters = [p for group in masters.param_groups for p in group["params"]]
    check_beside_closure(masters.optimizer, half=any(p.dtype in HALF for p in parameters))
    loss = evaluate(lambda: masters.optimizer.step(closure))
    device = parameters[0].device
    last = measure_grads({p: p.grad for p in parameters if p.grad is not None}, 1.0, device)
    masters.zero_grad()
    never, one = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), device=device)
    verdict = Verdict(skipped=False, dropped=0)
    return StepResult(never, last.amax, last.norm(), one, loss=loss, verdict=verdict)


def check_beside_closure(
    optimizer: Optimizer,
    *,
    half: bool = False,
    cast: bool = False,
    scaled: bool = False,
    clipped: bool = False,
    accumulated: bool = False,
    masked: bool = False,
) -> None:
    """Raise ConfigError if half weights or anything else does not go with a closure."""
    for present, what, way in (
        (half, "half weights", "dtype=fp32"),
        (cast, "ops cast to half", "dtype=fp32"),
        (scaled, "loss scaling", "loss_scaling=none"),
        (clipped, "clipping", "trainer.clip_norm=null trainer.clip_value=null"),
        (accumulated, "accumulation", "trainer.accumulate=1"),
        (masked, "skipping", "trainer.on_loss_spike=warn"),
    ):
        if present:
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: a closure goes without {what}; use {way} "
                "or an optimizer that takes no closure"
            )


@dataclass
class ClosureTrainer(Trainer):
    """A `Trainer` whose optimizer evaluates the loss itself.

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
        result = step_with_closure(optimizer, closure)
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
            check_beside_closure(
                self.optimizer.optimizer,
                half=self.precision.policy.mode == "mixed",
                cast=self.precision.policy.casts,
                scaled=bool(self.scalers),
                clipped=(self.plan.clip_norm or self.plan.clip_value) is not None,
                accumulated=self.plan.accumulate > 1,
                masked=spikes is not None and spikes.policy != "warn",
            )
