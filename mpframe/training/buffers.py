"""A model's buffers, restored after a skipped step.

BatchNorm moves its running statistics in the forward pass, long before the gradients say whether
the step counts. So the buffers are copied before the step and put back where it is skipped: one
overflow in a forward pass would otherwise leave nan in the statistics for good.
"""

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of a model and a copy of what they were.

    Args:
        model: on its device; its modules may replace their buffers, not their number.
    """

    def __init__(self, model: nn.Module) -> None:
        self._homes = [(m, name) for m in model.modules() for name in m._buffers]
        self._kept: list[Tensor] = []

    def save(self) -> None:
        """Copy the buffers as they are now."""
        self._kept = [buffer.clone() for buffer in self._current()]

    def restore_where(self, skipped: Tensor) -> None:
        """Put the copies back where `skipped` (0-d bool) is true, without waiting for a device."""
        if self._kept and (skipped.device.type != "cpu" or bool(skipped)):
            self._restore(skipped)

    @torch.no_grad()
    def _restore(self, skipped: Tensor) -> None:
        for buffer, kept in zip(self._current(), self._kept, strict=True):
            buffer.copy_(torch.where(skipped, kept, buffer))

    def _current(self) -> list[Tensor]:
        buffers = (module._buffers[name] for module, name in self._homes)
        return [buffer for buffer in buffers if buffer is not None]
