"""Checks of a scaler's arguments. Every refusal names `loss_scaling.<argument>`."""

import math
from numbers import Real
from typing import TypeGuard

import torch

from mpframe.errors import ConfigError
from mpframe.ranges import Range
from mpframe.tree import HALVES

Half = torch.dtype | str
"""A 16-bit format, or its name."""
COUNT_MAX = 2**31 - 1  # steps; far beyond any run, and safe in every integer format
FP32_MAX = torch.finfo(torch.float32).max
SCALES = Range(low=torch.finfo(torch.float32).tiny, high=FP32_MAX)
"""What a loss scale may be: a normal, finite float32. A subnormal one may be flushed to zero."""


def refused(
    argument: str, value: object, allowed: str, way_out: str = "leave it out for the default"
) -> ConfigError:
    """The error for a `value` that is not `allowed`."""
    return ConfigError(f"loss_scaling.{argument}={value}: must be {allowed}; {way_out}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number; a bool is none, `growth_interval: yes` is a slip."""
    return isinstance(value, Real) and not isinstance(value, bool)


def within(value: object, allowed: Range) -> TypeGuard[float]:
    """Whether `value` is a real number in a range."""
    return is_number(value) and allowed.holds(value if isinstance(value, int) else float(value))


def number(argument: str, value: object, allowed: Range) -> float:
    """`value` as a float, if it is a real number in the range."""
    if not within(value, allowed):
        raise refused(argument, value, f"a number {allowed}")
    return float(value)


def count(argument: str, value: object) -> int:
    """`value`, if it is a whole number from 1 to COUNT_MAX."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
        raise refused(argument, value, f"a whole number {Range(low=1, high=COUNT_MAX)}")
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
