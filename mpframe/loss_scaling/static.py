"""Static loss scaling: one scale, chosen by hand, for the whole run.

    s_t = s_0

This is the cheapest choice and the only one that keeps two runs comparable bit for bit. An overflow
still skips the step, so inf never reaches the weights; the scale stays as it is.
"""

import torch
from torch import Tensor

from mpframe.loss_scaling.ranges import SCALES, number
from mpframe.loss_scaling.scaler import Scaler


class Static(Scaler):
    """A constant loss scale.

    Args:
        scale: a positive, finite float32. A power of two makes scaling and unscaling exact.

    Raises:
        ConfigError: `scale` is out of its range.
    """

    kind = "static"

    def __init__(self, scale: float = 1.0) -> None:
        first = number("scale", scale, SCALES)
        super().__init__({"scale": torch.tensor(first, dtype=torch.float32)})

    def update(self, amax: Tensor) -> None:
        """Do nothing: the scale is fixed."""
