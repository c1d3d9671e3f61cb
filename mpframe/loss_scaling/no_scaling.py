"""No loss scaling, as a scaler: a step has one code path whether the loss is scaled or not."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor


class NoScaling:
    """Leaves the loss as it is. An overflow skips the step all the same."""

    kind = "none"

    def __init__(self) -> None:
        self._scale = torch.ones(())

    @property
    def scale(self) -> Tensor:
        """1, as 0-d float32."""
        return self._scale

    def update(self, amax: Tensor) -> None:
        """Do nothing."""

    def to(self, device: torch.device | str) -> Self:
        """Move the 1 to `device`, in place; returns self."""
        self._scale = self._scale.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take no state: that of a scaler means nothing here."""
