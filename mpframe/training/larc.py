"""LARC and LARS (You et al. 2017): each gradient is scaled by the size of its own weight.

    clip    LARC    g <- g * min(1, max(eta * |w| / (lr * (|g| + epsilon)), min_update))
    scale   LARS    g <- g * max(eta * |w| / (|g| + epsilon), min_update)

|.| is the 2-norm of one parameter, in fp32. One step of plain SGD then moves a weight by `eta` of
its norm: at most that much in `clip`, and the learning rate times that much in `scale`.

It is a hook that an optimizer calls before its step. Under `MasterWeights` it meets masters, and
gradients that are fp32, unscaled and checked. Weight decay is the optimizer's own: it is added
later and not scaled.

    optimizer.register_step_pre_hook(LARC(eta=0.001))
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.errors import ConfigError

MODES = ("clip", "scale")


class LARC:
    """Scales each gradient of an optimizer before its step.

    Args:
        eta: the trust coefficient: a weight's step as a share of its norm, > 0.
        mode: `clip` (LARC) never makes a gradient larger, `scale` (LARS) sets its norm.
        min_update: the smallest factor, >= 0. It is also that of a weight that is zero.
        epsilon: added to the gradient's norm, > 0.
        without: parameters, or their masters, whose gradients stay as they are.

    Attributes:
        rates: the learning rate that each weight had in its last step, its factor included, 0-d.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        eta: float,
        mode: str = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        without: Iterable[Tensor] = (),
    ) -> None:
        _require("eta", eta, eta > 0, "> 0; 0.001 is usual")
        _require("min_update", min_update, min_update >= 0, ">= 0; 1e-07 is usual")
        _require("epsilon", epsilon, epsilon > 0, "> 0; 1e-07 is usual")
        if mode not in MODES:
            raise ConfigError(f"larc.mode={mode}: choose clip (LARC) or scale (LARS)")
        self.eta, self.mode, self.min_update, self.epsilon = eta, mode, min_update, epsilon
        self.without = set(without)
        self.rates: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Scale the gradients in place; a parameter without one is left alone."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight not in self.without:
                    values = weight.grad._values() if weight.grad.is_sparse else weight.grad
                    factor = self._factor(weight, values, group["lr"])
                    values.mul_(factor)
                    self.rates[weight] = factor * group["lr"]

    def _factor(self, weight: Tensor, gradient: Tensor, lr: Tensor | float) -> Tensor:
        """0-d, what the gradient is multiplied by, within the gradient's format."""
        slope = _norm(gradient) + self.epsilon
        bounded_by = lr * slope if self.mode == "clip" else slope
        factor = torch.clamp(self.eta * _norm(weight) / bounded_by, min=self.min_update)
        most = 1.0 if self.mode == "clip" else torch.finfo(gradient.dtype).max
        return factor.clamp(max=most)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values.float())
    return norm


def _require(name: str, value: float, allowed: bool, words: str) -> None:
    if not (math.isfinite(value) and allowed):
        raise ConfigError(f"larc.{name}={value}: must be a finite number {words}")
