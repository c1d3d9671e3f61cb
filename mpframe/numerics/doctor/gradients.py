"""How gradients spread over the exponents, and what a loss scale makes of them in half.

With s the scale and m the half format's smallest number, a gradient g is lost where s |g| <= m / 2:
it rounds to zero (counted by whole octaves).
"""

import math

import torch
from torch import Tensor

_LOWEST = -160  # below fp32's smallest number, 2^-149
_BINS = 320


class GradientRange:
    """A count of gradients for each exponent, and the largest."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.int64)
        self.amax = 0.0

    def add(self, gradient: Tensor) -> None:
        """Count one tensor's values; zeros are left out, nothing can be lost of them."""
        values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
        magnitudes = values.float().abs().flatten()
        if magnitudes.numel() == 0:
            return
        self.amax = float(torch.tensor([self.amax, float(magnitudes.max())]).max())  # keeps nan
        known = magnitudes[(magnitudes > 0) & (magnitudes < torch.inf)]
        octaves = torch.frexp(known).exponent.long() - 1 - _LOWEST
        self._counts += torch.bincount(octaves, minlength=_BINS).cpu()

    def lost(self, scale: float, half: torch.dtype) -> float:
        """The share of the gradients other than 0 that are 0 in half at `scale`."""
        info = torch.finfo(half)
        first_kept = math.floor(math.log2(info.smallest_normal * info.eps / 2 / scale))
        lost = int(self._counts[: max(first_kept - _LOWEST, 0)].sum())
        return lost / max(int(self._counts.sum()), 1)

    def best_scale(self, half: torch.dtype) -> float:
        """The largest power of two that leaves an octave free above the largest gradient.

        2^16 where there is no gradient, or none that is finite.
        """
        if not 0.0 < self.amax < math.inf:
            return 2.0**16
        return 2.0 ** math.floor(math.log2(torch.finfo(half).max / 2 / self.amax))
