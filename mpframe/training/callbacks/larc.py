"""LARC and LARS (You et al. 2017): each gradient is scaled by the size of its weight.

    clip    LARC    g <- g * min(1, max(eta * |w| / (lr * (|g| + epsilon)), min_update))
    scale   LARS    g <- g * max(eta * |w| / (|g| + epsilon), min_update)

|.| is the 2-norm of one parameter, in fp32. One step of plain SGD then moves a weight by `eta` of
its norm: at most that much in `clip`, and the learning rate times that much in `scale`. The
optimizer adds weight decay later, unscaled.

`callbacks=larc` hooks it in for a run. In your loop:

    optimizer.register_step_pre_hook(LARC(eta=0.001))
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.errors import ConfigError
from mpframe.core.ranges import NOT_NEGATIVE, POSITIVE, require
from mpframe.core.step_result import StepResult
from mpframe.training.callbacks.step_hooks import StepHook
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

MODES = ("clip", "scale")


class LARC(StepHook):
    """Scales each gradient before its step, and in a run writes each rate to TensorBoard.

    Args:
        eta: the trust coefficient: a weight's step as a share of its norm, > 0.
        mode: `clip` (LARC) never makes a gradient larger, `scale` (LARS) sets its norm.
        min_update: the smallest factor, >= 0, and the factor of a weight that is zero.
        epsilon: added to the gradient's norm, > 0.
        without: patterns of the names of parameters whose gradients stay as they are.
        log_every: steps between two writes of the rates.

    Attributes:
        rates: the last learning rate of each weight, its factor included, 0-d.

    Raises:
        ConfigError: an argument is out of its range.
    """

    _context: RunContext

    def __init__(
        self,
        eta: float,
        mode: str = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        without: Sequence[str] = (),
        log_every: int = 10,
    ) -> None:
        require("larc.eta", eta, POSITIVE, "0.001 is usual", "a finite number")
        require("larc.min_update", min_update, NOT_NEGATIVE, "1e-07 is usual", "a finite number")
        require("larc.epsilon", epsilon, POSITIVE, "1e-07 is usual", "a finite number")
        if mode not in MODES:
            raise ConfigError(f"larc.mode={mode}: choose clip (LARC) or scale (LARS)")
        super().__init__("callbacks.larc", without)
        self.eta, self.mode, self.min_update, self.epsilon = eta, mode, min_update, epsilon
        self.rates: dict[Tensor, Tensor] = {}
        self._log_every = log_every

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Scale in place the gradients that there are."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight not in self.left_out:
                    values = weight.grad._values() if weight.grad.is_sparse else weight.grad
                    factor = self._factor(weight, values, group["lr"])
                    values.mul_(factor)
                    self.rates[weight] = factor * group["lr"]

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Hook in; ConfigError if gradients are clipped by their norm as well."""
        if trainer.plan.clip_norm is not None:
            raise ConfigError(
                f"trainer.clip_norm={trainer.plan.clip_norm}: LARC scales each gradient after the "
                "clipping, and would undo it; set trainer.clip_norm=null, or leave callbacks=larc "
                "out"
            )
        super().setup(trainer, context)
        self._context = context

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        step = trainer.progress.global_step
        if step % self._log_every == 0 and not result.known.skipped:
            rates = {f"larc/rate/{self.names[w]}": rate for w, rate in self.rates.items()}
            self._context.tracker.scalars(step, rates)

    def _factor(self, weight: Tensor, gradient: Tensor, lr: Tensor | float) -> Tensor:
        """Return the gradient's factor, 0-d, within the gradient's format."""
        slope = _norm(gradient) + self.epsilon
        bounded_by = lr * slope if self.mode == "clip" else slope
        factor = torch.clamp(self.eta * _norm(weight) / bounded_by, min=self.min_update)
        most = 1.0 if self.mode == "clip" else torch.finfo(gradient.dtype).max
        return factor.clamp(max=most)


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values.float())  # type: ignore[no-any-return]
