"""Counts magnitudes by exponent, and how many of them a half format loses.

The exponent of x is floor(log2 |x|), for x other than 0. A half format with smallest normal number
2^e, f bits behind the point and largest number M meets a scaled value y = s x. If |y| <= 2^(e-f-1),
half its smallest number, y becomes 0 (a tie goes to the even number, zero). Below 2^e the format
keeps fewer bits of y than it has. Above M it cannot hold y.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.core.tree import widest

LOWEST, HIGHEST = -127, 127
"""The exponents that are counted. All subnormal fp32 numbers, below 2^-126, share one bin."""
BINS = HIGHEST - LOWEST + 1

_PATTERNS = 2**15  # magnitudes of a 16-bit format
_PART = 2**16  # fp32 values that are counted at once on a CPU, so that all of it fits its cache

FIELDS = (
    *("count", "zeros", "bad", "lost_at_half_scale", "lost", "lost_at_twice_scale"),
    *("subnormal", "over", "amax"),
)
"""The numbers before the bins in a row of `count_exponents`."""
WIDTH = len(FIELDS) + BINS


@dataclass(frozen=True)
class Limits:
    lost: float  # the largest magnitude that rounds to zero
    normal: float  # the smallest that keeps all its bits
    largest: float

    @classmethod
    def of(cls, half: torch.dtype) -> "Limits":
        info = torch.finfo(half)
        return cls(info.smallest_normal * info.eps / 2, info.smallest_normal, info.max)


def count_exponents(
    values: Tensor, limits: Limits, scale: Tensor | float = 1.0, held_at: Tensor | float = 1.0
) -> Tensor:
    """Count a tensor's magnitudes.

    Args:
        values: any shape, floating. A sparse tensor's entries are counted.
        limits: of the half format.
        scale: s, by which the values are multiplied in the format: 0-d or a number, a power of two.
        held_at: the power of two that they are multiplied by already. They are divided by it first.

    Returns:
        [WIDTH] float64 on the tensor's device: the counts of `FIELDS`, then of each exponent from
        LOWEST to HIGHEST. `count` counts all values, `bad` inf and nan, `lost` and its neighbours
        nonzero values that round to zero at that multiple of the scale, `subnormal` the others
        below the smallest normal number, `over` finite values above the largest. `amax` is the
        largest finite |s x|, 0 if there is none.
    """
    entries = values.coalesce().values() if values.is_sparse else values
    values = entries.detach().reshape(-1)
    if values.device.type == "cpu" and values.element_size() > 2 and values.numel() > _PART:
        parts = torch.split(values, _PART)
        return add_rows([count_exponents(part, limits, scale, held_at) for part in parts])
    magnitudes, counts = _different(values)
    held = isinstance(held_at, Tensor) or held_at != 1
    wide = magnitudes.float() / held_at if held else magnitudes.float()

    def count(which: Tensor) -> Tensor:
        return which.sum() if counts is None else (which * counts).sum()

    finite = wide < torch.inf
    zero = wide == 0
    scaled = torch.where(finite, wide, 0.0) * scale
    zeros, bad = count(zero), count(~finite)
    nothing = zeros + bad  # these are 0 in `scaled`, but they are not lost
    lost = [count(scaled <= limits.lost * k) - nothing for k in (2.0, 1.0, 0.5)]
    below_normal = count(scaled < limits.normal) - nothing
    there = scaled if counts is None else torch.where(counts > 0, scaled, 0.0)
    fields = [
        torch.as_tensor(values.numel(), device=wide.device),
        zeros,
        bad,
        *lost,
        (below_normal - lost[1]).clamp(min=0),
        count(scaled > limits.largest),
        there.max() if there.numel() else torch.zeros((), device=wide.device),
    ]
    kind = widest(wide.device)
    row = torch.stack([field.to(kind) for field in fields])
    bits = (wide.view(torch.int32) >> 23) & 255  # The biased exponent, 0 for subnormals and zero.
    bins = tally(bits, 256, counts)
    bins[0] -= zeros
    return torch.cat([row, bins[:BINS].to(kind)])  # The last one, 255, stands for inf and nan.


def _different(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return magnitudes, and how often each is there (None: once), at most 2^15 in 16 bits."""
    if values.element_size() != 2 or values.numel() <= _PATTERNS:
        return values.abs(), None
    patterns = torch.arange(_PATTERNS, dtype=torch.int16, device=values.device)
    counts = tally(values.view(torch.int16) & (_PATTERNS - 1), _PATTERNS)
    return patterns.view(values.dtype), counts


def tally(numbers: Tensor, size: int, counts: Tensor | None = None) -> Tensor:
    """Count how often each of 0 to size - 1 is there, or sum its counts: [size] int64."""
    if numbers.device.type == "cpu" and counts is None:
        return torch.bincount(numbers, minlength=size)
    ones = torch.ones_like(numbers, dtype=torch.int64) if counts is None else counts
    total = torch.zeros(size, dtype=torch.int64, device=numbers.device)
    return total.scatter_add_(0, numbers.long(), ones)


def add_rows(rows: list[Tensor]) -> Tensor:
    """Merge the rows of several tensors: counts add up, `amax` is the largest."""
    stacked = torch.stack(rows)
    total = stacked.sum(dim=0)
    at = FIELDS.index("amax")
    total[at] = stacked[:, at].max()
    return total
