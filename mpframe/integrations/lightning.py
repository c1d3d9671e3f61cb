"""A precision plugin for Lightning:

    plugin = MpframePrecision("mixed", half="float16", scaler=LogMax())
    Trainer(plugins=plugin, callbacks=[Autopsy()])

`gradient_clip_val`, `accumulate_grad_batches` and checkpoints work as before, also with a fused
optimizer. A step that is skipped leaves weights, optimizer state and buffers as they were, but
Lightning steps its schedules.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.core.loss_scaling.scaler import LossScaler
from mpframe.integrations.mixed_precision import MixedPrecision


class MpframePrecision(LightningPrecision):  # type: ignore[misc]
    """mpframe's dtype modes, op lists, fp32 masters and loss scalers as a plugin.

    It takes the arguments of `MixedPrecision`, which is the attribute `mixed`. Its `result` is the
    `StepResult` of the last step.
    """

    def __init__(
        self,
        mode: str = "mixed",
        half: str = "float16",
        scaler: LossScaler | None = None,
        **options: Any,
    ) -> None:
        self.mixed = MixedPrecision(mode, half, scaler, **options)
        self._bounds: dict[str, float] = {}  # of the next step
        name = "16-mixed" if half == "float16" else "bf16-mixed"
        self.precision = "32-true" if mode == "fp32" else name

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare the model, which is on its device, and its optimizers."""
        return model, list(self.mixed.prepare(model, *optimizers)), lr_schedulers

    def forward_context(self) -> AbstractContextManager[None]:
        """Cast the ops of a validation, a test or a prediction."""
        return self.mixed.precision.cast()

    def train_step_context(self) -> AbstractContextManager[None]:
        """Cast the ops of a training step."""
        return self.mixed.forward()

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        return super().pre_backward(self.mixed.scale(tensor), module)  # type: ignore[no-any-return]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Compute the gradients, then unscale, check, clip, and update or skip."""
        loss = closure()
        self._after_closure(model, optimizer)
        bounds, self._bounds = self._bounds, {}
        if loss is not None or not model.automatic_optimization:
            self.mixed.step(optimizer, **bounds)
        return loss

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Note the bound: the step clips, when the gradients are unscaled."""
        if clip_val > 0:
            bound = "max_value" if gradient_clip_algorithm == "value" else "max_norm"
            self._bounds[bound] = float(clip_val)

    def state_dict(self) -> dict[str, Any]:
        return self.mixed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mixed.load_state_dict(state_dict)


class Autopsy(Callback):  # type: ignore[misc]
    """Tells the plugin the batches, so that it can examine a step if too many are skipped."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        def loss_of(module: Any, batch: Any) -> Tensor:
            logged = {name: lambda *_, **__: None for name in ("log", "log_dict")}
            vars(module).update(logged)  # What was logged already is not logged again.
            try:
                output = module.training_step(batch, batch_idx)
            finally:
                for name in logged:
                    del vars(module)[name]
            loss: Tensor = output["loss"] if isinstance(output, dict) else output
            return loss

        trainer.precision_plugin.mixed.note_batch(batch, loss_of, trainer.current_epoch, batch_idx)
