"""Hugging Face's Trainer with mpframe's precision:

    trainer = MpframeTrainer(model, args, ..., mixed=MixedPrecision("mixed", scaler=LogMax()))

A subclass of the Trainer takes `PrecisionMixin` first among its bases. Gradient accumulation,
`max_grad_norm`, schedules, evaluation and checkpoints work as before. A step that is skipped leaves
weights, optimizer state, buffers and schedule as they were, but counts in `global_step`.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer

from mpframe.integrations.accelerate import MasterOptimizer, connect
from mpframe.integrations.mixed_precision import MixedPrecision


class PrecisionMixin:
    """Makes a Trainer train in a dtype mode.

    Args:
        mixed: the dtype mode and the loss scaler. None: `mixed` in float16 with `Backoff`. As an
            attribute it has the `StepResult` of the last step as its `result`.
    """

    def __init__(self, *args: Any, mixed: MixedPrecision | None = None, **options: Any) -> None:
        self.mixed = MixedPrecision() if mixed is None else mixed
        super().__init__(*args, **options)

    def create_optimizer(self: Any, model: Any = None) -> Optimizer:
        """Create the optimizer, and wrap it over masters. ConfigError for `fp16` and `bf16`."""
        optimizer: Any = super().create_optimizer(model)  # type: ignore[misc]
        if not isinstance(optimizer, MasterOptimizer):
            optimizer = connect(self.accelerator, self.mixed, self.model, optimizer)
        self.optimizer = optimizer
        return optimizer  # type: ignore[no-any-return]

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Tensor:
        """Train on a micro-batch, and note it for an autopsy."""
        epoch, step = int(self.state.epoch or 0), self.state.global_step
        self.mixed.note_batch(self._prepare_inputs(inputs), self.compute_loss, epoch, step)
        loss: Tensor = super().training_step(model, inputs, *rest, **named)  # type: ignore[misc]
        return loss

    def compute_loss_context_manager(self: Any) -> ExitStack:
        """Return a block that casts the ops of the forward pass and the loss."""
        stack: ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        training = self.model.training
        stack.enter_context(self.mixed.forward() if training else self.mixed.precision.cast())
        return stack


class MpframeTrainer(PrecisionMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer in a dtype mode of mpframe."""
