"""LogMax as it was published, from its equations and with its flaws: a negative control.

Per step, with a the largest |unscaled gradient|:

    x = 2^16 on overflow, log2 a otherwise              (x is in octaves: 16 was meant)
    m <- β₁ m + (1-β₁) x,   μ = m / (1-β₁^t)            the fast mean
    l <- β₂ l + (1-β₂) x,   q <- β₂ q + (1-β₂) x²       the slow moments, corrected alike
    σ = √max(q - l², 0)                                 around another mean than μ
    s = clamp(2^(16 - μ - 3.09 σ), min, max)
"""

import math
from statistics import NormalDist

import torch

FAST, SLOW = 0.99, 0.999


class PublishedLogMax:
    """The published state machine behind the same two names: `scale` and `update`."""

    def __init__(self, init_scale=1.0, probability=0.001, min_scale=1.0, max_scale=2.0**14):
        self.scale = torch.tensor(init_scale)
        self._quantile = -NormalDist().inv_cdf(probability)
        self._bounds = (math.log2(min_scale), math.log2(max_scale))
        self._fast = self._slow = self._square = torch.zeros(())
        self._steps = 0

    def update(self, amax) -> None:
        self._steps += 1
        x = torch.where(amax.isfinite(), amax.log2(), 2.0**16)
        self._fast = FAST * self._fast + (1 - FAST) * x
        self._slow = SLOW * self._slow + (1 - SLOW) * x
        self._square = SLOW * self._square + (1 - SLOW) * x.square()
        fast_weight, slow_weight = 1 - FAST**self._steps, 1 - SLOW**self._steps
        spread = self._square / slow_weight - (self._slow / slow_weight).square()
        cutoff = self._fast / fast_weight + self._quantile * spread.clamp(min=0).sqrt()
        self.scale = (16.0 - cutoff).clamp(*self._bounds).exp2()
