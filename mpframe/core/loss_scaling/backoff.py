"""Backoff: trial and error. The scale grows after clean steps and shrinks on overflow.

With g the growth factor, b the backoff factor, N the growth interval, h the hysteresis, c the
consecutive clean steps, and o the overflows since the last growth:

    clean:     c <- c + 1;          if c = N:   s <- min(g s, max),  c <- 0,  o <- 0
    overflow:  c <- 0,  o <- o + 1; if o >= h:  s <- max(b s, min)

This is the rule of `torch.amp.GradScaler` (h = 1), and its kernel, with Megatron's hysteresis, a
floor and a ceiling. The kernel leaves s if g s is beyond float32. o is counted if h > 1. Without a
floor the scale can reach 0, and dividing by it writes inf into the weights.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mpframe.core.loss_scaling.scaler import DEFAULT, SCALES, Scaler, number, power_of_two
from mpframe.core.ranges import Range, make_range_error, require, require_whole
from mpframe.core.tree import HALVES, is_apple

DEFAULT_SCALE = 2.0**16
PROBE = "probe"
_EXPONENTS = (-126, 127)  # of the normal float32 numbers
_MOST_STEPS = 2**31 - 1  # far beyond any run, and safe in every integer format
_GROWTH = Range(above=1.0, high=SCALES.high)
_SHRINK = Range(above=0.0, below=1.0)

InitScale = float | Literal["probe"]
Half = torch.dtype | str
"""A 16-bit format, or its name."""


class AdaptiveScaler(Scaler, ABC):
    """A scaler that moves within [min_scale, max_scale] and can start from a probe.

    Its arguments are explained at `Backoff`.
    """

    def __init__(
        self, init_scale: InitScale, min_scale: float, max_scale: float, half: Half
    ) -> None:
        dtype = HALVES.get(str(half).removeprefix("torch."))
        if dtype is None:
            raise make_range_error("loss_scaling.half", half, "float16 or bfloat16", DEFAULT)
        self._limit = torch.finfo(dtype).max
        self._top = math.log2(self._limit)
        self._min = number("min_scale", min_scale, SCALES)
        self._max = number("max_scale", max_scale, SCALES)
        if self._min > self._max:
            allowed = f"at most max_scale, which is {self._max:.10g}"
            way_out = "lower it, or raise max_scale"
            raise make_range_error("loss_scaling.min_scale", min_scale, allowed, way_out)
        first = self._default = min(max(DEFAULT_SCALE, self._min), self._max)
        probing = isinstance(init_scale, str) and init_scale == PROBE
        if not probing:
            first = require(
                "loss_scaling.init_scale",
                init_scale,
                Range(low=self._min, high=self._max),
                "set it, or move min_scale and max_scale",
                f"{PROBE} or a number",
            )
        super().__init__(self._initial_state(torch.tensor(first, dtype=torch.float32)))
        self.wants_probe = probing

    @property
    def floor(self) -> float:
        return self._min

    def start_from(self, amax: Tensor) -> None:
        """Start again, with the largest safe power of two for the gradients of a probe.

        `amax` is 0-d float32, their largest magnitude, unscaled. If it is 0, inf or nan, the scale
        is 2^16, within the bounds.
        """
        known = (amax > 0) & (amax < torch.inf)
        exponent = largest_power_below(self._limit / 2, torch.where(known, amax, 1.0))
        probed = power_of_two(exponent.clamp(*_EXPONENTS)).clamp(self._min, self._max)
        self.state = self._initial_state(torch.where(known, probed, self._default))
        self.wants_probe = False

    @abstractmethod
    def _initial_state(self, scale: Tensor) -> dict[str, Tensor]:
        """Return the state of a scaler that starts at `scale`, on its device."""


class Backoff(AdaptiveScaler):
    """A loss scale that grows after a run of clean steps and shrinks on overflow.

    Args:
        init_scale: the first scale, or "probe".
        growth_factor: what the scale is multiplied by on growth, > 1.
        backoff_factor: what it is multiplied by on overflow, in (0, 1).
        growth_interval: consecutive clean steps, the last of which grows the scale.
        hysteresis: which overflow since the last growth (or the start) first shrinks the scale, as
            every later one does until the next growth. 1 = every overflow.
        min_scale: the floor, > 0.
        max_scale: the ceiling.
        half: the run's 16-bit format, or its name, for the probe.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        init_scale: InitScale = DEFAULT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        half: Half = torch.float16,
    ) -> None:
        super().__init__(init_scale, min_scale, max_scale, half)
        self._growth_factor = number("growth_factor", growth_factor, _GROWTH)
        self._backoff_factor = number("backoff_factor", backoff_factor, _SHRINK)
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        for name, steps in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            require_whole(f"loss_scaling.{name}", steps, 1, _MOST_STEPS, DEFAULT)

    def _initial_state(self, scale: Tensor) -> dict[str, Tensor]:
        none = torch.zeros_like(scale, dtype=torch.int32)
        return {"scale": scale, "clean_steps": none, "overflows": none.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # The kernel grows the scale at the interval, and a longer one may have been counted.
        self.state["clean_steps"].clamp_(max=self._growth_interval - 1)

    def update(self, amax: Tensor) -> None:
        """Grow or shrink, told `amax` as a `LossScaler` is."""
        self.wants_probe = False
        before, clean_steps, overflows = self.state.values()
        # In one kernel a copy, which the next one writes, and 0, or nan, which counts as true.
        scale, overflow = torch._foreach_mul([before, amax], [1.0, 0.0])
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(scale, clean_steps, overflow, *factors)
        if self._hysteresis > 1:
            bad = overflow.isnan()
            overflows += bad
            scale = torch.where(bad & (overflows < self._hysteresis), before, scale)
            overflows.masked_fill_((clean_steps == 0) & ~bad, 0)
        self.state["scale"] = scale.clamp_(self._min, self._max)


def largest_power_below(limit: float, amax: Tensor) -> Tensor:
    """Return the largest e with 2^e * amax <= limit, as int32, for a finite amax > 0."""
    value = amax.cpu() if is_apple(amax.device) else amax
    room = torch.frexp(torch.as_tensor(limit, dtype=torch.float64, device=value.device))
    used = torch.frexp(value.double())  # float64 holds the subnormal float32 as normal numbers
    exponent = room.exponent - used.exponent - (used.mantissa > room.mantissa).int()
    return exponent.to(amax.device)
