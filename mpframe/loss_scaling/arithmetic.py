"""A few functions of numbers, for floats of the host and for 0-d tensors of a device.

Equations are written once for both. On a GPU they are kernels that nobody waits for. For a CPU
nobody waits, and there an op on a 0-d tensor takes thirty times as long as one on a float.

Both are IEEE double and round alike, so a state is the same on either.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from mpframe.loss_scaling.powers import exponent_of, power_of_two

Number = Any
"""A float, or a 0-d float64 tensor; a comparison of two gives a bool of the same kind."""


class Arithmetic(Protocol):
    """What equations need beside + - * / and comparisons."""

    def where(self, condition: Number, value: Number, other: Number) -> Number:
        """`value` if `condition`, else `other`, which is no constant."""

    def clamp(self, value: Number, low: float | None = None, high: float | None = None) -> Number:
        """The nearest number within the bounds."""

    def sqrt(self, value: Number) -> Number:
        """The square root of a number >= 0."""

    def log2(self, value: Number) -> Number:
        """The binary logarithm of a number > 0."""

    def floor(self, value: Number) -> Number:
        """The largest whole number that is no larger."""

    def power_of_two(self, exponent: Number) -> Number:
        """2^exponent for whole exponents from -126 to 127; on a device float32."""

    def exponent_of(self, power: Number) -> Number:
        """e of 2^e."""


class OnHost(Arithmetic):
    """Of floats."""

    def where(self, condition: Number, value: Number, other: Number) -> Number:
        return value if condition else other

    def clamp(self, value: Number, low: float | None = None, high: float | None = None) -> Number:
        value = value if low is None or value >= low else low
        return value if high is None or value <= high else high

    def sqrt(self, value: Number) -> Number:
        return math.sqrt(value)

    def log2(self, value: Number) -> Number:
        return torch.log2(torch.tensor(value, dtype=torch.float64)).item()  # math's rounds unlike.

    def floor(self, value: Number) -> Number:
        return float(math.floor(value))

    def power_of_two(self, exponent: Number) -> Number:
        return math.ldexp(1.0, int(exponent))

    def exponent_of(self, power: Number) -> Number:
        return math.frexp(power)[1] - 1  # frexp gives a mantissa in [0.5, 1)


class OnDevice(Arithmetic):
    """Of 0-d tensors; nothing waits for the device."""

    def where(self, condition: Number, value: Number, other: Number) -> Number:
        if isinstance(value, float):  # A float among tensors would be sent to the device.
            return other.masked_fill(condition, value)
        return torch.where(condition, value, other)

    def clamp(self, value: Number, low: float | None = None, high: float | None = None) -> Number:
        return value.clamp(low, high)

    def sqrt(self, value: Number) -> Number:
        return value.sqrt()

    def log2(self, value: Number) -> Number:
        return torch.log2(value)

    def floor(self, value: Number) -> Number:
        return value.floor()

    def power_of_two(self, exponent: Tensor) -> Number:
        return power_of_two(exponent)

    def exponent_of(self, power: Tensor) -> Number:
        return exponent_of(power)


ON_HOST, ON_DEVICE = OnHost(), OnDevice()
