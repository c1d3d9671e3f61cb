"""The values that an option may have, and the check of a number against them."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

from mpframe.core.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The values that are allowed, beyond their type.

    Attributes:
        low, high: inclusive ends.
        above, below: exclusive ends.
        choices: the only values allowed.
        words: words that are allowed besides numbers.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """True if `value` is allowed; None (an option that is switched off) always is."""
        if value is None or value in self.words:
            return True
        if self.choices:
            return value in self.choices
        if isinstance(value, str) and self.numeric:
            return False
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._holds_number(value)
        return True

    @property
    def numeric(self) -> bool:
        """True if the option is a number."""
        return any(end is not None for end in (self.low, self.high, self.above, self.below))

    def _holds_number(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        ends = [f"> {self.above:.10g}"] if self.above is not None else []
        ends += [f">= {self.low:.10g}"] if self.low is not None else []
        ends += [f"<= {_number(self.high)}"] if self.high is not None else []
        ends += [f"< {self.below:.10g}"] if self.below is not None else []
        return " or ".join([" and ".join(ends), *self.words]) if ends else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


POSITIVE = Range(above=0.0)
NOT_NEGATIVE = Range(low=0.0)
FRACTION = Range(low=0.0, high=1.0)


def require(
    section: str, allowed: Range, kind: str = "a number", way_out: str = "", /, **values: object
) -> None:
    """Check that each value is a finite number in a range; a bool is not a number.

    Args:
        section: the options' path in the configuration.
        allowed: the range.
        kind: how the message names such a number.
        way_out: the end of the message.
        values: option name -> value.

    Raises:
        ConfigError: names the first that is not.
    """
    for name, value in values.items():
        if not within(value, allowed):
            raise _refused(section, name, value, f"{kind} {allowed}".lstrip(), way_out)


def require_whole(
    section: str, low: int = 1, high: int | None = None, way_out: str = "", /, **values: object
) -> None:
    """Check that each value is a whole number from `low` to `high`; as `require` otherwise."""
    allowed = Range(low=low, high=high)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not allowed.holds(value):
            raise _refused(section, name, value, f"a whole number {allowed}", way_out)


def within(value: object, allowed: Range) -> TypeGuard[float]:
    """Whether `value` is a real number in a range; a bool is not a number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and allowed.holds(value)
    return isinstance(value, Real) and allowed.holds(float(value))


def _refused(section: str, name: str, value: object, allowed: str, way_out: str) -> ConfigError:
    end = f"; {way_out}" if way_out else ""
    return ConfigError(f"{section}.{name}={value}: must be {allowed}{end}")
