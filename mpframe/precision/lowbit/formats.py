"""Element formats below 16 bits, and the rounding of fp32 values to them.

A format has a number of exponent bits, a number of mantissa bits, and special codes. Nothing is
packed: a rounded value is an fp32 number that the format can hold. So every format runs on every
device, and a new one is one more line. The Hadamard transform spreads an outlier over its block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.core.ranges import make_range_error, require_whole

_BIAS, _MANTISSA = 127, 23  # of fp32
_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True)
class ElementFormat:
    """A floating-point format of one sign bit, some exponent bits and some mantissa bits.

    By `specials` the highest exponent holds inf and nan (`inf`, as in IEEE 754), or only the
    highest code is nan (`nan`), or all codes are finite numbers (`none`).
    """

    name: str  # as recipes call it
    exponent_bits: int  # 1 to 8
    mantissa_bits: int  # 1 to 10, without the leading one
    specials: str = "none"

    def __post_init__(self) -> None:
        path = f"format {self.name}: "
        require_whole(f"{path}exponent_bits", self.exponent_bits, 1, 8)
        require_whole(f"{path}mantissa_bits", self.mantissa_bits, 1, 10)
        if self.specials not in ("inf", "nan", "none"):
            raise make_range_error(f"{path}specials", self.specials, "one of inf, nan, none")
        if not self.min_exponent <= self.max_exponent <= _BIAS:
            raise ConfigError(
                f"{path}specials={self.specials}: leaves no number, or larger ones than fp32 has"
            )

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number and of all subnormal ones."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        codes = 1 << self.exponent_bits
        return self.min_exponent + codes - (3 if self.specials == "inf" else 2)

    @property
    def max(self) -> float:
        """The largest finite number."""
        units = 2.0 if self.specials == "nan" else 1.0
        return (2.0 - units * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent


# The formats that hardware has, by name.
FORMATS = {
    known.name: known
    for known in (
        ElementFormat("tf32", 8, 10, "inf"),
        ElementFormat("e4m3fn", 4, 3, "nan"),
        ElementFormat("e5m2", 5, 2, "inf"),
        ElementFormat("e2m3", 2, 3),
        ElementFormat("e3m2", 3, 2),
        ElementFormat("e2m1", 2, 1),
    )
}

# Gives random numbers in [0, 1), fp32, of the shape and on the device of its argument.
Draw = Callable[[Tensor], Tensor]


def round_to(values: Tensor, format: ElementFormat, draw: Draw | None = None) -> Tensor:
    """Round float32 values to the nearest numbers that `format` holds, ties to even.

    With `draw` they go up or down at random, so that the mean is the value. Finite values beyond
    the range become the largest number. inf and nan stay, even in a format without codes for them,
    because an overflow must be found.
    """
    rounded = round_finite_(values.clone(), format, draw).copysign_(values)
    return torch.where(values.isinf(), values, rounded)


def round_finite_(values: Tensor, format: ElementFormat, draw: Draw | None = None) -> Tensor:
    """Round like `round_to`, but in place, as new memory is slow, and without inf and -0.0."""
    values.clamp_(-format.max, format.max)
    if format.exponent_bits == 8:
        return _round_bits_(values, format, draw)
    if draw is None:
        return _round_to_nearest_(values, format)
    return _round_at_random_(values, format, draw)


def _exponents(values: Tensor, format: ElementFormat) -> Tensor:
    """Return the bits of 2^floor(log2 |value|), or of the smallest normal number if larger."""
    exponents = values.view(torch.int32) & _EXPONENT_MASK
    return exponents.clamp_(min=(format.min_exponent + _BIAS) << _MANTISSA)


def _round_to_nearest_(values: Tensor, format: ElementFormat) -> Tensor:
    """Round by fp32's addition: adding and subtracting 1.5 * 2^23 units leaves whole units."""
    shift = (_MANTISSA - format.mantissa_bits) << _MANTISSA
    large = _exponents(values, format).add_(shift | 1 << (_MANTISSA - 1)).view(torch.float32)
    return values.add_(large).sub_(large)


def _round_at_random_(values: Tensor, format: ElementFormat, draw: Draw) -> Tensor:
    """Round down to a unit, and up by one with the probability of the remaining fraction."""
    units = _exponents(values, format).sub_(format.mantissa_bits << _MANTISSA).view(torch.float32)
    down = values.div_(units).floor()
    up = draw(values) < values.sub_(down)
    return values.copy_(down).add_(up).mul_(units)


def _round_bits_(values: Tensor, format: ElementFormat, draw: Draw | None) -> Tensor:
    """Cut the mantissa's last bits of a format with fp32's range. A carry may move the exponent."""
    cut = _MANTISSA - format.mantissa_bits
    bits = values.view(torch.int32)
    if draw is None:
        carry = ((bits >> cut) & 1).add_((1 << (cut - 1)) - 1)
    else:
        carry = draw(values).mul_(1 << cut).to(torch.int32)
    carry.masked_fill_(values.isnan(), 0)
    bits.add_(carry).bitwise_and_(-(1 << cut))
    return values


def transform(values: Tensor, axis: int, size: int) -> Tensor:
    """Transform float32 values in blocks of `size`, a power of two that divides the axis.

    They are multiplied by D H, which is orthogonal, and the same at each call.
    """
    rows, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(rows) < size:
        rows = torch.kron(pair, rows)
    signs = torch.rand(size, 1, generator=torch.Generator().manual_seed(size)) < 0.5
    matrix = (torch.where(signs, -rows, rows) / math.sqrt(size)).to(values.device)
    blocks = torch.unflatten(values, axis, (-1, size)).movedim(axis + 1, -1)
    return (blocks @ matrix).movedim(-1, axis + 1).flatten(axis, axis + 1)
