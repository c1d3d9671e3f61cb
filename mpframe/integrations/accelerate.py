"""mpframe's precision with Accelerate:

    accelerator = Accelerator(gradient_accumulation_steps=2)
    mixed = MixedPrecision("mixed", half="float16", scaler=LogMax())
    model, optimizer = prepare(accelerator, mixed, model, optimizer)

The loop stays as it is, but for `with mixed.forward():` around the forward pass and the loss.
`accelerator.clip_grad_norm_` returns the norm, which is filled in by `optimizer.step()`.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.core.errors import ConfigError
from mpframe.integrations.mixed_precision import MixedPrecision


class MasterOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer over masters, as Accelerate wraps one."""

    _is_accelerate_prepared = True

    def __init__(self, optimizer: Optimizer, mixed: MixedPrecision, device: torch.device) -> None:
        super().__init__(optimizer, device_placement=False)
        self._mixed, self._norm = mixed, torch.zeros((), device=device)
        self._bounds: dict[str, float] = {}  # of the next step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step at the end of a window of micro-batches."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step: Accelerate's takes no closure with mpframe; compute the loss first"
            )
        if self.gradient_state.sync_gradients:
            bounds, self._bounds = self._bounds, {}
            result = self._mixed.step(self.optimizer, **bounds)
            self._norm.copy_(result.grad_norm)
            self._is_overflow = bool(result.skipped)

    def clip_by_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Note the bound: the step clips, when gradients are unscaled, and fills the norm in."""
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: mpframe clips by the 2-norm; leave it out")
        if max_norm < float("inf"):
            self._bounds["max_norm"] = float(max_norm)
        return self._norm

    def clip_by_value(self, parameters: Any, clip_value: float) -> None:
        """Note the bound of the next step."""
        self._bounds["max_value"] = float(clip_value)


def connect(
    accelerator: Accelerator, mixed: MixedPrecision, model: nn.Module, optimizer: Optimizer
) -> MasterOptimizer:
    """Prepare a model on its device, wrap its optimizer, and let `accelerator` use both.

    ConfigError: the accelerator has a mixed precision of its own.
    """
    own = accelerator.mixed_precision
    if own != "no":
        raise ConfigError(
            f"mixed_precision={own}: both would cast; leave it out (for Hugging Face's Trainer "
            "fp16=True or bf16=True), and tell MixedPrecision the mode"
        )
    (masters,) = mixed.prepare(model, optimizer)
    accelerator.scaler = mixed  # `backward` scales the loss by it, and checkpoints keep its state.
    connected = MasterOptimizer(masters, mixed, accelerator.device)
    accelerator.clip_grad_norm_ = connected.clip_by_norm
    accelerator.clip_grad_value_ = connected.clip_by_value
    return connected


def prepare(
    accelerator: Accelerator, mixed: MixedPrecision, model: nn.Module, optimizer: Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Prepare a model and its optimizer, as `accelerator.prepare` does. Raises as `connect`."""
    connected = connect(accelerator, mixed, model.to(accelerator.device), optimizer)
    return accelerator.prepare(model, connected)  # type: ignore[no-any-return]
