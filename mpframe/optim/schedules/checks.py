"""Refusals of a schedule's arguments. Each names `scheduler.<argument>`."""

from mpframe.config.range import Range
from mpframe.errors import ConfigError


def require(
    option: str,
    value: float,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> None:
    """Refuse a number that is not finite or not within the limits, which are those of a `Range`."""
    allowed = Range(low=low, above=above, high=high)
    if not allowed.holds(value):
        raise ConfigError(f"scheduler.{option}={value}: must be a number {allowed}")


def require_fractions(**options: float) -> None:
    """Refuse what is not a fraction."""
    for option, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"scheduler.{option}={value}: must be a fraction >= 0 and <= 1")
