"""What changes gradients right before a step: LARC or LARS, and a penalty on the weights.

There the weights are masters, and their gradients fp32, unscaled, checked and clipped.
"""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.core.step_result import StepResult
from mpframe.training.larc import LARC
from mpframe.training.multi_optimizer import parts_of
from mpframe.training.run_context import RunContext
from mpframe.training.selection import Selection, hint
from mpframe.training.trainer import Trainer


class StepHook(Callback):
    """Calls itself before each step of the run's optimizers.

    Args:
        option: its path in the configuration, for messages.
        without: patterns of the names of weights that it leaves alone.

    Attributes:
        names: the names of all weights, by the tensors that the optimizers step.
        left_out: those of these tensors that it leaves alone.
    """

    def __init__(self, option: str, without: Sequence[str]) -> None:
        self._option, self._without = option, without
        self.names: dict[Tensor, str] = {}
        self.left_out: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Change the gradients of an optimizer that is about to step."""

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Begin.

        Raises:
            ConfigError: the optimizer takes a closure, or a pattern matches no parameter.
        """
        if trainer.optimizer.needs_closure:
            raise ConfigError(
                f"{self._option}: the optimizer makes its gradients within its step, where no hook "
                "reaches them; choose an optimizer without a closure"
            )
        named = dict(trainer.model.named_parameters())
        self._refuse_idle(list(named))
        optimizer = trainer.optimizer
        parts = parts_of(optimizer).values()
        for part in parts:  # A frozen group is in none of them.
            self.names |= {
                part.optimizer_param(own): n for n, own in named.items() if part.holds(own)
            }
            self._handles.append(part.register_step_pre_hook(self))
        takes = Selection(self._without).takes
        self.left_out = {w for w, name in self.names.items() if takes(name, named[name])}

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()

    def _refuse_idle(self, names: Sequence[str]) -> None:
        for pattern in self._without:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{self._option}.without=[{pattern}]: matches no parameter; "
                    f"{hint(pattern, names)}"
                )


class LayerwiseRates(StepHook):
    """Runs `LARC` before each step, and writes the rate of each parameter to TensorBoard.

    Args:
        eta: the trust coefficient: a weight's step as a share of its norm, > 0.
        mode: `clip` (LARC) or `scale` (LARS).
        min_update: the smallest factor, >= 0.
        epsilon: added to the gradient's norm, > 0.
        without: patterns of the names of parameters whose gradients stay as they are.
        log_every: steps between two writes of the rates.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        eta: float,
        mode: str = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        without: Sequence[str] = (),
        log_every: int = 10,
    ) -> None:
        self._larc, self._log_every = LARC(eta, mode, min_update, epsilon), log_every
        super().__init__("callbacks.larc", without)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Scale the gradients of an optimizer that is about to step."""
        self._larc(optimizer)

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Begin.

        Raises:
            ConfigError: gradients are clipped by their norm, too.
        """
        if trainer.plan.clip_norm is not None:
            raise ConfigError(
                f"trainer.clip_norm={trainer.plan.clip_norm}: LARC scales each gradient after the "
                "clipping, and would undo it; set trainer.clip_norm=null, or leave callbacks=larc "
                "out"
            )
        super().setup(trainer, context)
        self._larc.without |= self.left_out
        self._context = context

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log the rates if they are due."""
        step = trainer.progress.global_step
        if step % self._log_every == 0 and not result.known.skipped:
            rates = {f"larc/rate/{self.names[w]}": rate for w, rate in self._larc.rates.items()}
            self._context.tracker.scalars(step, rates)


class Penalty(StepHook):
    """Adds the gradient of `strength * penalty(weight)` to the gradient of each weight.

    Args:
        penalty: penalty(weight) -> 0-d tensor with a gradient; it is given the fp32 master.
        strength: > 0.
        without: patterns of the names of weights that have no penalty.

    Raises:
        ConfigError: `strength` is out of its range.
    """

    def __init__(
        self, penalty: Callable[[Tensor], Tensor], strength: float, without: Sequence[str] = ()
    ) -> None:
        if not 0.0 < strength < math.inf:
            raise ConfigError(f"callbacks.penalty.strength={strength}: must be a finite number > 0")
        super().__init__("callbacks.penalty", without)
        self._penalty, self._strength = penalty, strength

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Add to the gradients; a weight without one is left alone."""
        for weight in (w for group in optimizer.param_groups for w in group["params"]):
            if weight.grad is not None and weight not in self.left_out:
                with torch.enable_grad():
                    master = weight.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(self._penalty(master), master)
                weight.grad = torch.add(weight.grad, gradient, alpha=self._strength)
