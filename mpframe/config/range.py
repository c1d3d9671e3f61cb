"""What a number or a word may be: the one range behind every refusal, here and in the scalers."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """What a value may be, beyond its type.

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
