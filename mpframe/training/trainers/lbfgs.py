"""Optimizers that evaluate the loss themselves, such as LBFGS: their step, and their trainer.

They try points and go back, so their step cannot be skipped as a whole, and the losses that they
compare must not be rounded: fp32 weights, no loss scaling, no clipping. torch's other optimizers
only run a closure before they step, which `MasterWeights.step` does for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.core.objective import require_objective
from mpframe.core.optim.gradients import measure_grads
from mpframe.core.optim.master_weights import MasterWeights, evaluate_closure
from mpframe.core.step_result import StepResult, Verdict
from mpframe.core.tree import HALF
from mpframe.training.callbacks.guards import spikes_of
from mpframe.training.trainer import Trainer


def step_with_closure(masters: MasterWeights, closure: Callable[[], Any]) -> StepResult:
    """Step an optimizer that evaluates the loss itself, which is never skipped.

    `closure` computes the loss and calls backward, as often as the optimizer likes. Returns its
    loss, and amax and norm of the last evaluation's gradients. ConfigError for half weights.
    """
    parameters = [p for group in masters.param_groups for p in group["params"]]
    if any(parameter.dtype in HALF for parameter in parameters):
        raise _goes_without(masters.optimizer, _HALF_WEIGHTS)
    _, loss = evaluate_closure(None, lambda: masters.step_wrapped(closure))
    device = parameters[0].device
    last = measure_grads({p: p.grad for p in parameters if p.grad is not None}, 1.0, device)
    masters.zero_grad()
    never, one = torch.zeros((), device=device), torch.ones((), device=device)
    verdict = Verdict(skipped=False, dropped=0)
    return StepResult(never, last.amax, last.norm(), one, loss=loss, verdict=verdict)


_HALF_WEIGHTS = "half weights; use dtype=fp32"


def _goes_without(optimizer: Optimizer, obstacle: str) -> ConfigError:
    return ConfigError(
        f"optimizer={type(optimizer).__name__}: a closure goes without {obstacle} or an optimizer "
        "that takes no closure"
    )


@dataclass
class ClosureTrainer(Trainer):
    """A `Trainer` whose optimizer evaluates the loss itself.

    ConfigError: half weights, casts, a scaler, clipping, accumulation or skipping beside it.
    """

    optimizer: Any  # a `MasterWeights`

    def train_step(self, *batches: Batch) -> StepResult:
        """Make one step on one batch, whose loss the optimizer evaluates as often as it likes.

        All ranks get the mean loss and the mean gradients, and so go the same way.
        """
        optimizer = self.optimizer
        self.comm.begin_step(optimizer, "after_backward")

        def closure() -> Tensor:
            (loss,) = self.accumulate_losses(optimizer, self.objectives, batches)
            for parameter, gradient in optimizer.collect_step_grads(1.0).by_master.items():
                parameter.grad = gradient
            return loss

        result = step_with_closure(optimizer, closure)
        if result.loss is not None:
            for algorithm in self.algorithms.values():  # No such step is skipped.
                algorithm.before_update(self, [result.loss])
        return self.finish_step(result)

    def check_fit(self) -> None:
        """Raise ConfigError if anything is used that does not go with a closure."""
        require_objective("objective", self.objective)
        plan, spikes = self.plan, spikes_of(self)
        clips = plan.clip_norm is not None or plan.clip_value is not None
        obstacles = {
            _HALF_WEIGHTS: self.precision.policy.mode == "mixed",
            "ops cast to half; use dtype=fp32": self.precision.policy.casts,
            "loss scaling; use loss_scaling=none": bool(self.scalers),
            "clipping; use trainer.clip_norm=null trainer.clip_value=null": clips,
            "accumulation; use trainer.accumulate=1": plan.accumulate > 1,
            "skipping; use callbacks.loss_spikes.policy=warn": spikes and spikes.policy != "warn",
        }
        for obstacle, present in obstacles.items():
            if present:
                raise _goes_without(self.optimizer.optimizer, obstacle)
