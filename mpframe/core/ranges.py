"""The values that an option may have, and the checks that a number is one of them."""

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from mpframe.core.errors import ConfigError

_COMPARE = {">": operator.gt, ">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Range:
    """The values that are allowed, beyond their type.

    Attributes:
        low, high: inclusive ends.
        above, below: exclusive ends.
        choices: the only values allowed.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Return whether `value` is allowed, as None always is: an option switched off."""
        if value is None:
            return True
        if self.choices:
            return (str(value).lower() if isinstance(value, bool) else value) in self.choices
        if isinstance(value, str):
            return not self._ends()
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and all(_COMPARE[sign](value, end) for sign, end in self._ends().items())

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        ends = [
            f"{sign} {end}" if isinstance(end, int) else f"{sign} {end:.10g}"
            for sign, end in self._ends().items()
        ]
        return " and ".join(ends)

    def _ends(self) -> dict[str, float]:
        signs = {">": self.above, ">=": self.low, "<=": self.high, "<": self.below}
        return {sign: end for sign, end in signs.items() if end is not None}


POSITIVE = Range(above=0.0)
NOT_NEGATIVE = Range(low=0.0)
FRACTION = Range(low=0.0, high=1.0)


def require(
    option: str, value: object, allowed: Range, way_out: str = "", kind: str = "a number"
) -> float:
    """Return `value` if it is a finite number in a range, and not a bool.

    Raises:
        ConfigError: `option=value: must be {kind} {allowed}; {way_out}`.
    """
    number = value if isinstance(value, int) else float(value) if isinstance(value, Real) else None
    if number is None or isinstance(number, bool) or not allowed.holds(number):
        raise make_range_error(option, value, f"{kind} {allowed}".strip(), way_out)
    return number


def require_whole(
    option: str, value: object, least: int = 1, most: int | None = None, way_out: str = ""
) -> int:
    """Return `value` if it is a whole number from `least` to `most`, or raise as `require`."""
    allowed = Range(low=least, high=most)
    if isinstance(value, bool) or not isinstance(value, int) or not allowed.holds(value):
        raise make_range_error(option, value, f"a whole number {allowed}", way_out)
    return value


def make_range_error(option: str, value: object, allowed: str, way_out: str = "") -> ConfigError:
    """Return the error for a `value` that is not `allowed`."""
    return ConfigError(f"{option}={value}: must be {allowed}" + (f"; {way_out}" if way_out else ""))
