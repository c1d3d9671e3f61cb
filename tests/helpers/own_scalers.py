"""Loss scalers as users write them, and one that lacks something."""

from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.loss_scaling import Scaler


class Drifting(Scaler):
    """Doubles every so many steps, halves on overflow: all that a subclass needs to say."""

    def __init__(self, start: float = 1024.0, every: int = 3) -> None:
        scale = torch.tensor(start, dtype=torch.float32)
        super().__init__({"scale": scale, "clean": torch.zeros(())})
        self._every = every

    def update(self, amax: Tensor) -> None:
        overflow = ~(amax < torch.inf)
        clean = (self.state["clean"] + 1).masked_fill(overflow, 0)
        grown = torch.where(clean % self._every == 0, self.scale * 2, self.scale)
        self.state = {"scale": torch.where(overflow, self.scale / 2, grown), "clean": clean}


class Module(nn.Module):
    """Nothing of mpframe in it: a module has all but `update`."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(256.0))

    def update(self, amax: Tensor) -> None:
        self.scale = torch.where(amax < torch.inf, self.scale * 1.5, self.scale / 2)


class Number:
    """Its scale is a number, which cannot change without the host."""

    scale = 8.0

    def update(self, amax: Tensor) -> None: ...
    def to(self, device: Any) -> "Number":
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
