"""Is an argument of a scaler allowed? Every refusal names `loss_scaling.<argument>`."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

import torch

from mpframe.errors import ConfigError
from mpframe.tree import HALVES

Half = torch.dtype | str
"""A 16-bit format, or its name."""
COUNT_MAX = 2**31 - 1  # steps; far beyond any run, and safe in every integer format


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers from `low` to `high`; each end belongs to it unless it is open."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.low_open else self.low <= value
        below = value < self.high if self.high_open else value <= self.high
        return above and below  # both are False for nan

    def __str__(self) -> str:
        left, right = "(["[not self.low_open], ")]"[not self.high_open]
        return f"{left}{self.low:.10g}, {self.high:.10g}{right}"


_FP32 = torch.finfo(torch.float32)
SCALES = Interval(_FP32.tiny, _FP32.max)
"""What a loss scale may be: a normal, finite float32. A subnormal one may be flushed to zero."""


def refused(
    argument: str, value: object, allowed: str, way_out: str = "leave it out for the default"
) -> ConfigError:
    """The error for a `value` that is not `allowed`."""
    return ConfigError(
        f"loss_scaling.{argument}={value!r} is not allowed: it must be {allowed}; {way_out}"
    )


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number; a bool is none, `growth_interval: yes` is a slip."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(argument: str, value: object, interval: Interval) -> float:
    """`value` as a float, if it is a real number in `interval`."""
    if not is_number(value) or value not in interval:
        raise refused(argument, value, f"a number in {interval}")
    return float(value)


def count(argument: str, value: object) -> int:
    """`value`, if it is a whole number from 1 to COUNT_MAX."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
        raise refused(argument, value, f"a whole number from 1 to {COUNT_MAX}")
    return value


def half_format(value: object) -> torch.dtype:
    """The 16-bit format that `value` is or names, if a run can use it."""
    for name, half in HALVES.items():
        if value is half or value == name:
            return half
    raise refused("half", value, "float16 or bfloat16")


def whole_octaves(argument: str, scale: float) -> int:
    """e, if `scale` is 2^e."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise refused(argument, scale, "a power of two", f"use 2**{exponent - 1} or 2**{exponent}")
    return exponent - 1
