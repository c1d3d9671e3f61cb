"""LogMax: the scale follows from a model of the gradients instead of trial and error.

With a the largest |unscaled gradient| of a step, s = 2^e the scale, and T = log2 of the half
format's largest number, all that matters is where the scaled gradients lie, in octaves:

    x = log2(s a)                               on overflow x = max(T, μ)
    r = x - μ                                   the surprise, around the mean in use
    m  <- m + [n >= J and r > z σ + m] - p      within [0, M]; the bracket is 1 or 0
    σ² <- σ² + max(1/(n+ν), 1-β₂) (r² - σ²)     σ₀² at the first observation; clean steps only
    μ  <- μ  + max(1/(n+1), 1-β₁) r             clean steps only
    n  <- n + 1                                 clean steps only

x is taken as nearly normal, and p is `overflow_probability`. The scale rests at the largest power
of two that leaves room for the quantile z of p (3.09 for 0.001) and for the margin m, and retreats
from there by d octaves on overflows:

    rest = e + ⌊T - μ - z σ - m⌋                clamped to [min, max]
    d <- 2 d + 1 on overflow, ⌊d/2⌋ on a clean step
    e <- max(rest - d, min)                     on overflow at most e - 1
                                                μ moves along, as x would have

Why it is so (docs/loss_scaling.md has the evidence):

- The equations use s a and never a by itself, and s moves by whole octaves: gradients 2^k times as
  large give a scale 2^k times as small, bit for bit.
- The averages begin as plain ones and turn into moving ones with decays β₁ and β₂. σ is the spread
  of the errors that μ really made. At first ν observations of σ₀ octaves stand in for it.
- Real gradients have higher spikes than normal ones, and something larger than a may overflow. A
  gradient beyond the room held for it costs a margin of one octave, and 1/p steps without one give
  it back. So while m < M at most p N + M of N steps are beyond, whatever the distribution (adaptive
  conformal inference, Gibbs and Candès 2021). Before the J-th observation none is judged.
- An overflow says only that the gradient was larger than s could hold: enough for the margin, and
  not for the averages. It must not lower the scale for long, and many in a row must end soon: the
  retreats are 1, 2, 4, 8 octaves and are taken back in the reverse order.
- `RESTART_AFTER` observations in a row beyond `SURPRISE` σ on the same side are another level, not
  chance (3e-7 per step and side for normal x): the model forgets, and starts from the next
  gradient. Until then an overflow only makes the scale retreat.
- a = 0 is no observation: a frozen or masked batch has no largest gradient.
"""

import functools
import logging
import math
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from mpframe.core.loss_scaling.backoff import DEFAULT_SCALE, AdaptiveScaler, Half, InitScale
from mpframe.core.loss_scaling.scaler import exponent_of, number, power_of_two
from mpframe.core.ranges import Range, make_range_error
from mpframe.core.tree import host_waits_for, widest

log = logging.getLogger(__name__)

PRIOR_STD = 1.0  # σ₀ in octaves: batches differ by less in most training
PRIOR_WEIGHT = 4.0  # ν: after 50 equal gradients the prior asks for z √(4/53) = 0.85 octaves
JUDGED_AFTER = 10  # J: a spread wider than σ₀ shows by then
MAX_MARGIN = 10.0  # M, of float16's 40 octaves: if many batches hold a nan, no room would ever do
SURPRISE = 2.0  # in σ: one normal observation in 44 lies beyond it on one side
RESTART_AFTER = 4  # beyond chance, and a jump costs about this many skips
MAX_RETREAT = 255.0  # octaves, after 8 overflows in a row, taken back by 8 clean steps

Number = Any  # a float, or a 0-d tensor, the `widest`; comparing two gives a bool of the same kind
_State = dict[str, Number]
Arithmetic = SimpleNamespace  # The functions of the equations beside + - * / and comparisons.
ON_HOST = Arithmetic(  # of floats, which on a CPU take an eighth of the time of tensors
    where=lambda condition, value, other: value if condition else other,
    clamp=lambda value, low, high: min(max(value, low), high),
    sqrt=math.sqrt,
    log2=lambda value: torch.tensor(value, dtype=torch.float64).log2().item(),  # math.log2 differs.
    floor=math.floor,
    power_of_two=lambda exponent: math.ldexp(1.0, int(exponent)),
    exponent_of=lambda power: math.frexp(power)[1] - 1,  # frexp's mantissa is in [0.5, 1)
)
ON_DEVICE = Arithmetic(  # of 0-d tensors, without waiting for the device
    # A float among tensors would be sent to the device.
    where=lambda c, v, o: o.masked_fill(c, v) if type(v) is float else torch.where(c, v, o),
    clamp=torch.clamp,
    sqrt=torch.sqrt,
    log2=torch.log2,
    floor=torch.floor,
    power_of_two=power_of_two,
    exponent_of=exponent_of,
)

_PROBABILITIES = Range(above=0.0, below=0.5)
_DECAYS = Range(low=0.0, below=1.0)


class LogMax(AdaptiveScaler):
    """The largest power of two that overflows with less than `overflow_probability`.

    Args:
        init_scale: the first scale, a power of two, or "probe".
        overflow_probability: the share of steps that may overflow, in (0, 0.5).
        mean_decay: β₁, in [0, 1): the mean remembers about 1/(1-β₁) steps.
        variance_decay: β₂, in [0, 1): the spread remembers about 1/(1-β₂) steps.
        min_scale: the floor, a power of two.
        max_scale: the ceiling, a power of two.
        half: the run's 16-bit format, or its name. s a must not pass its largest number.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        init_scale: InitScale = DEFAULT_SCALE,
        overflow_probability: float = 0.001,
        mean_decay: float = 0.99,
        variance_decay: float = 0.999,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        half: Half = torch.float16,
    ) -> None:
        self._probability = number("overflow_probability", overflow_probability, _PROBABILITIES)
        self._quantile = -NormalDist().inv_cdf(self._probability)
        self._mean_gain = 1 - number("mean_decay", mean_decay, _DECAYS)
        self._variance_gain = 1 - number("variance_decay", variance_decay, _DECAYS)
        super().__init__(init_scale, min_scale, max_scale, half)
        self._floor = _octaves("min_scale", self._min)
        self._ceiling = _octaves("max_scale", self._max)
        if not self.wants_probe:
            _octaves("init_scale", float(init_scale))

    def _initial_state(self, scale: Tensor) -> dict[str, Tensor]:
        zero = torch.zeros_like(scale, dtype=widest(scale.device))
        # Half an octave below the edge: `scale` is where the scale rests, however this rounds.
        mean = zero + (self._top - self._quantile * PRIOR_STD - 0.5)
        counts = ("count", "margin", "highs", "lows", "retreat")
        rest = {name: zero.clone() for name in counts}  # A graph of aliases would be another one.
        return {"scale": scale, "mean": mean, "variance": zero + PRIOR_STD**2, **rest}

    @property
    def log2_mean(self) -> Tensor:
        """The modelled mean of log2(largest |unscaled gradient|): 0-d float64, octaves."""
        return self.state["mean"] - exponent_of(self.scale)

    @property
    def log2_std(self) -> Tensor:
        """The modelled standard deviation of the same: 0-d float64, octaves."""
        return self.state["variance"].sqrt()

    def update(self, amax: Tensor) -> None:
        """Observe `amax`, given as to any `LossScaler`, and choose the scale."""
        self.wants_probe = False
        if amax.dim() == 0 and not host_waits_for(amax.device):
            seen = amax.item()
            if seen != 0:
                now = {name: value.item() for name, value in self.state.items()}
                new = self._after(now, seen, ON_HOST)
                values = torch.tensor([*new.values()], dtype=torch.float64).unbind()
                self.state = dict(zip(new, values, strict=True))
                self.state["scale"] = torch.tensor(new["scale"], dtype=torch.float32)
            return
        ways = _ways()[:1] if torch.compiler.is_compiling() else _ways()
        try:
            self.state = ways[-1](self, self.state, amax)
        except Exception as error:  # For instance there is no C compiler.
            log.warning("loss_scaling=LogMax: not compiled, so it takes longer: %s", error)
            self.state = ways[0](self, self.state, amax)
            del ways[1:]

    def _observe(self, state: dict[str, Tensor], amax: Tensor) -> dict[str, Tensor]:
        new, ignored = self._after(state, amax.to(state["mean"].dtype), ON_DEVICE), amax == 0
        return {n: torch.where(ignored, old, new[n]) for n, old in state.items()}

    def _after(self, now: _State, amax: Number, on: Arithmetic) -> _State:
        """Return the state after an observation, by the equations above."""
        clean = amax < math.inf  # nan compares false, so it counts as an overflow
        mean, bound = now["mean"], SURPRISE * on.sqrt(now["variance"])
        held = on.log2(amax * now["scale"])  # float64, where no product overflows
        surprise = on.where(clean, held, on.clamp(mean, self._top, math.inf)) - mean
        highs = (now["highs"] + 1) * ((surprise > bound) & (now["count"] > 0))
        lows = (now["lows"] + 1) * ((surprise < -bound) & (now["count"] > 0))
        restart = highs + lows >= RESTART_AFTER
        exceeded = (surprise > self._reserve(now, on)) & (now["count"] >= JUDGED_AFTER)
        margin = on.clamp(now["margin"] + exceeded - self._probability, 0.0, MAX_MARGIN)
        further = on.clamp(2 * now["retreat"] + 1, 0.0, MAX_RETREAT)
        count = on.where(restart, 0.0, now["count"])
        counted = {"margin": margin, "highs": highs, "lows": lows}
        new = {
            **self._moments(now, surprise, count, clean, on),
            **{name: on.where(restart, 0.0, value) for name, value in counted.items()},
            "retreat": on.where(clean, on.floor(now["retreat"] / 2), further),
        }
        return new | self._choose_scale(now["scale"], new, clean, on)

    def _reserve(self, state: _State, on: Arithmetic) -> Number:
        """Return the octaves above the mean that are held free: z σ + m."""
        return self._quantile * on.sqrt(state["variance"]) + state["margin"]

    def _moments(
        self, now: _State, surprise: Number, count: Number, clean: Number, on: Arithmetic
    ) -> _State:
        """Return mean, variance and count after an observation. An overflow changes none."""
        mean, variance = now["mean"], now["variance"]
        mean_gain = on.clamp(1 / (count + 1), self._mean_gain, math.inf)
        variance_gain = on.clamp(1 / (count + PRIOR_WEIGHT), self._variance_gain, math.inf)
        learned = variance + variance_gain * (surprise * surprise - variance)
        learned = on.where(count == 0, PRIOR_STD**2, learned)
        return {
            "mean": on.where(clean, mean + mean_gain * surprise, mean),
            "variance": on.where(clean, learned, variance),
            "count": count + clean,
        }

    def _choose_scale(self, scale: Number, new: _State, clean: Number, on: Arithmetic) -> _State:
        """Return the scale for the new state, and the mean relative to that scale."""
        exponent = on.exponent_of(scale)
        room = self._top - new["mean"] - self._reserve(new, on)
        rest = on.clamp(exponent + on.floor(room), self._floor, self._ceiling)
        chosen = on.clamp(rest - new["retreat"], self._floor, math.inf)
        # A restart gives the margin back, and with it more octaves than the retreat takes.
        halved = chosen - on.clamp(chosen - exponent + 1.0, 0.0, math.inf)
        chosen = on.where(clean, chosen, on.clamp(halved, self._floor, math.inf))
        return {"scale": on.power_of_two(chosen), "mean": new["mean"] + (chosen - exponent)}


@functools.cache
def _ways() -> list[Any]:
    """Return how to run `LogMax._observe`: op by op, and if Triton is there as one kernel."""
    observe: Any = LogMax._observe
    return [observe, torch.compile(observe, dynamic=False)] if has_triton() else [observe]


def _octaves(argument: str, scale: float) -> int:
    """Return e if `scale` is 2^e, else raise ConfigError."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        nearest = f"use 2**{exponent - 1} or 2**{exponent}"
        raise make_range_error(f"loss_scaling.{argument}", scale, "a power of two", nearest)
    return exponent - 1
