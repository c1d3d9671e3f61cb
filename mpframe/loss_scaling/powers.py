"""Exact powers of two on any device.

`exp2` and `pow` are exact only within a bound, which differs between devices. If a scale is off by
one bit, every unscaling rounds. So these functions read and write the bits.
"""

import math

import torch
from torch import Tensor

_FP32_BIAS = 127
_FP32_MANTISSA_BITS = 23


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, for whole exponents from -126 to 127 in any dtype."""
    bits = (exponent.int() + _FP32_BIAS) << _FP32_MANTISSA_BITS
    return bits.view(torch.float32)


def exponent_of(power: Tensor) -> Tensor:
    """e of 2^e, as int32."""
    return torch.frexp(power).exponent - 1  # frexp gives a mantissa in [0.5, 1)


def largest_power_below(limit: float, amax: Tensor) -> Tensor:
    """The largest e with 2^e * amax <= limit, as int32; `amax` is finite and > 0."""
    room = torch.frexp(torch.as_tensor(limit, dtype=torch.float64, device=amax.device))
    used = torch.frexp(amax.double())  # float64 holds the subnormal float32 as normal numbers
    return room.exponent - used.exponent - (used.mantissa > room.mantissa).int()


def safe_scale(amax: float, half: torch.dtype, octaves: int = 1) -> float | None:
    """The largest power of two that leaves some octaves free above a gradient of this magnitude.

    Args:
        amax: the largest |unscaled gradient|.
        half: the format whose largest number limits the scaled gradient.
        octaves: how many are left free, >= 0.

    Returns:
        The scale; None if `amax` is 0, inf or nan, and so tells nothing.
    """
    if not 0.0 < amax < math.inf:
        return None
    limit = torch.finfo(half).max / 2.0**octaves
    return 2.0 ** int(largest_power_below(limit, torch.tensor(amax, dtype=torch.float64)))
