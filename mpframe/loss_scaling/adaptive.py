"""What `Backoff` and `LogMax` share: bounds on the scale, and a start taken from a probe.

The right first scale is not known. A constant, 2^16, costs a skipped step for every octave that it
is too high, and gradients become 0 if it is too low. With `init_scale="probe"` the caller makes one
backward pass before step 1, and its largest |gradient| a decides:

    s_0 = the largest 2^e with 2^e a <= limit / 2

This leaves one to two octaves free for the next batches, whose gradients may be larger.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from mpframe.loss_scaling.powers import largest_power_below, power_of_two
from mpframe.loss_scaling.ranges import (
    SCALES,
    Half,
    half_format,
    number,
    refused,
    within,
)
from mpframe.loss_scaling.scaler import Scaler
from mpframe.ranges import Range

DEFAULT_SCALE = 2.0**16
PROBE = "probe"
_EXPONENTS = (-126, 127)  # of the normal float32 numbers

InitScale = float | Literal["probe"]


class AdaptiveScaler(Scaler, ABC):
    """A scaler that moves within [min_scale, max_scale] and can start from a probe.

    Args:
        init_scale: the first scale, within the bounds, or "probe".
        min_scale: the floor, > 0.
        max_scale: the ceiling, finite.
        half: the run's 16-bit format, or its name; its largest number is what a scaled gradient
            must not pass.

    Raises:
        ConfigError: an argument is out of its range, or the bounds do not hold `init_scale`.
    """

    def __init__(
        self, init_scale: InitScale, min_scale: float, max_scale: float, half: Half
    ) -> None:
        self._limit = torch.finfo(half_format(half)).max
        self._top = math.log2(self._limit)
        self._min = number("min_scale", min_scale, SCALES)
        self._max = number("max_scale", max_scale, SCALES)
        if self._min > self._max:
            allowed = f"at most max_scale, which is {self._max:.10g}"
            raise refused("min_scale", min_scale, allowed, "lower it, or raise max_scale")
        self._default = min(max(DEFAULT_SCALE, self._min), self._max)
        probing = isinstance(init_scale, str) and init_scale == PROBE
        first = self._default if probing else self._within_bounds(init_scale)
        super().__init__(self._initial_state(torch.tensor(first, dtype=torch.float32)))
        self._wants_probe = probing

    @property
    def floor(self) -> float:
        """`min_scale`."""
        return self._min

    def start_from(self, amax: Tensor) -> None:
        """Start again, with the largest safe power of two for the gradients of a probe.

        Args:
            amax: 0-d float32, the largest |unscaled gradient| of the probe. Zero, inf and nan say
                nothing: the scale is then 2^16, within the bounds.
        """
        known = (amax > 0) & (amax < torch.inf)
        exponent = largest_power_below(self._limit / 2, torch.where(known, amax, 1.0))
        probed = power_of_two(exponent.clamp(*_EXPONENTS)).clamp(self._min, self._max)
        self.state = self._initial_state(torch.where(known, probed, self._default))
        self._wants_probe = False

    def _within_bounds(self, init_scale: object) -> float:
        bounds = Range(low=self._min, high=self._max)
        if not within(init_scale, bounds):
            allowed = f"{PROBE} or a number {bounds}"
            way_out = "set it, or move min_scale and max_scale"
            raise refused("init_scale", init_scale, allowed, way_out)
        return float(init_scale)

    @abstractmethod
    def _initial_state(self, scale: Tensor) -> dict[str, Tensor]:
        """The state of a scaler that has seen nothing and starts at `scale`, on its device."""
