"""Callbacks that change gradients right before a step: their base, and a penalty on the weights.

The weights are then masters, and their gradients fp32, unscaled, checked and clipped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import POSITIVE, require
from mpframe.training.multi_optimizer import parts_of
from mpframe.training.run_context import RunContext
from mpframe.training.selection import Selection, refuse_idle
from mpframe.training.trainer import Trainer


class StepHook(Callback):
    """Calls itself before each step of the run's optimizers.

    Args:
        option: its path in the configuration, for messages.
        without: patterns of the names of weights that it does not change.

    Attributes:
        names: the names of all weights, by the tensors that the optimizers step.
        left_out: the tensors that it does not change.
    """

    def __init__(self, option: str, without: Sequence[str]) -> None:
        self._option, self._without = option, without
        self.names: dict[Tensor, str] = {}
        self.left_out: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Change the gradients of an optimizer that is about to step."""

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Hook in; ConfigError if the optimizer takes a closure, or a pattern matches nothing."""
        if trainer.optimizer.needs_closure:
            raise ConfigError(
                f"{self._option}: the optimizer makes its gradients within its step, where no hook "
                "reaches them; choose an optimizer without a closure"
            )
        named = dict(trainer.model.named_parameters())
        refuse_idle(f"{self._option}.without", "parameter", self._without, list(named))
        for part in parts_of(trainer.optimizer).values():  # A frozen group is in none of them.
            held = {name: p for name, p in named.items() if part.holds(p)}
            self.names |= {part.optimizer_param(p): name for name, p in held.items()}
            self._handles.append(part.register_step_pre_hook(self))
        takes = Selection(self._without).takes
        self.left_out = {w for w, name in self.names.items() if takes(name, named[name])}

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()


class Penalty(StepHook):
    """Adds the gradient of `strength * penalty(weight)` to the gradient of each weight.

    Args:
        penalty: penalty(weight) -> 0-d tensor with a gradient, called with the fp32 master.
        strength: > 0, else ConfigError.
        without: patterns of the names of weights that have no penalty.
    """

    def __init__(
        self, penalty: Callable[[Tensor], Tensor], strength: float, without: Sequence[str] = ()
    ) -> None:
        require("callbacks.penalty.strength", strength, POSITIVE, kind="a finite number")
        super().__init__("callbacks.penalty", without)
        self._penalty, self._strength = penalty, strength

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for weight in (w for group in optimizer.param_groups for w in group["params"]):
            if weight.grad is not None and weight not in self.left_out:
                with torch.enable_grad():
                    master = weight.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(self._penalty(master), master)
                weight.grad = torch.add(weight.grad, gradient, alpha=self._strength)
