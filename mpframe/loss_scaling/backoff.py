"""Backoff: trial and error. The scale grows after clean steps and shrinks on overflow.

With g the growth factor, b the backoff factor, N the growth interval, h the hysteresis, and per
step c = consecutive clean steps, o = overflows since the last growth:

    clean:     c <- c + 1;          if c = N:   s <- min(g s, max),  c <- 0,  o <- 0
    overflow:  c <- 0,  o <- o + 1; if o >= h:  s <- max(b s, min)

The rule of `torch.amp.GradScaler` (h = 1), with Megatron's hysteresis, and with a floor and a
ceiling: without a floor the scale can reach 0, and dividing by it writes inf into the weights.
"""

import torch
from torch import Tensor

from mpframe.loss_scaling.adaptive import DEFAULT_SCALE, AdaptiveScaler, InitScale
from mpframe.loss_scaling.ranges import FP32_MAX, Half, count, number
from mpframe.ranges import Range

_GROWTH = Range(above=1.0, high=FP32_MAX)
_SHRINK = Range(above=0.0, below=1.0)


class Backoff(AdaptiveScaler):
    """A loss scale that grows after a run of clean steps and shrinks on overflow.

    Args:
        init_scale: the first scale, or "probe".
        growth_factor: what the scale is multiplied by on growth, > 1.
        backoff_factor: what it is multiplied by on overflow, in (0, 1).
        growth_interval: consecutive clean steps before growth; the last of them already grows it.
        hysteresis: the overflow since the last growth (or the start) that first shrinks the scale;
            every later one does too, until a growth starts the count again. 1 = every overflow.
        min_scale: the floor, > 0.
        max_scale: the ceiling.
        half: the run's 16-bit format, or its name; only the probe needs it.

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
        self._growth_interval = count("growth_interval", growth_interval)
        self._hysteresis = count("hysteresis", hysteresis)

    def _initial_state(self, scale: Tensor) -> dict[str, Tensor]:
        none = torch.zeros_like(scale, dtype=torch.int64)
        return {"scale": scale, "clean_steps": none, "overflows": none}

    def update(self, amax: Tensor) -> None:
        """Grow or shrink. `amax`: 0-d float32, the largest |unscaled gradient|; inf = overflow."""
        self._wants_probe = False
        scale, clean_steps, overflows = self.state.values()
        overflow = ~(amax < torch.inf)  # nan compares false, so it counts as an overflow
        clean_steps = (clean_steps + 1).masked_fill(overflow, 0)
        overflows = overflows + overflow
        grow = clean_steps == self._growth_interval
        shrink = overflow & (overflows >= self._hysteresis)

        grown = torch.where(grow, scale * self._growth_factor, scale)
        scale = torch.where(shrink, scale * self._backoff_factor, grown)
        self.state = {
            "scale": scale.clamp(self._min, self._max),
            "clean_steps": clean_steps.masked_fill(grow, 0),
            "overflows": overflows.masked_fill(grow, 0),
        }
