"""A model's buffers, restored after a skipped step.

BatchNorm moves its running statistics in the forward pass, long before the gradients say whether
the step counts. So the buffers are copied before the step and put back where it is skipped: one
overflow in a forward pass would otherwise leave nan in the statistics for good.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpframe.distributed.world import World


class Buffers:
    """The buffers of a model and a copy of what they were.

    Args:
        model: on its device; its modules may replace their buffers, not their number.
    """

    def __init__(self, model: nn.Module) -> None:
        self._homes = [(m, name) for m in model.modules() for name in m._buffers]
        self._kept: list[tuple[nn.Module, str, Tensor]] = []

    def save(self) -> None:
        """Copy the buffers as they are now."""
        self._kept = []
        for module, name in self._homes:
            buffer = module._buffers[name]
            if buffer is not None:
                self._kept.append((module, name, buffer.clone()))

    def broadcast(self, world: World) -> None:
        """Give all ranks the buffers of rank 0, whose samples alone moved them."""
        if world.size > 1:
            world.broadcast_(self._present())

    def start_broadcast(self, world: World) -> Callable[[], None]:
        """Begin what `broadcast` does; the call of what is returned ends it."""
        return world.start_broadcast_(self._present())

    def _present(self) -> list[Tensor]:
        buffers = [module._buffers[name] for module, name in self._homes]
        return [buffer for buffer in buffers if buffer is not None]

    @torch.no_grad()
    def restore_where(self, skipped: Tensor | bool) -> None:
        """Put the copies back if `skipped`: a bool, or 0-d on the device without waiting for it."""
        if skipped is False:
            return
        for module, name, kept in self._kept:
            buffer = module._buffers[name]
            if buffer is not None:
                buffer.copy_(kept if skipped is True else torch.where(skipped, kept, buffer))
