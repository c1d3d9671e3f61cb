"""The best validation of a run so far, and whether the last one is much worse.

"Much worse" is a gap between the last value and the best one that is above both

    8 times the median change from one validation to the next
    5 % of the best value

The first keeps noise from being called a decline: the gap of values that only scatter lies below it
in about 99 of 100 runs, or more. The second does so if most validations are equal. A value of nan
or inf is much worse than any other.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Self

from mpframe.checkpoint.folder import rank

_TIMES_THE_CHANGE = 8.0
_SHARE_OF_BEST = 0.05


@dataclass
class Best:
    """The best value of one metric.

    Attributes:
        name: the metric, or `loss`; empty before the first validation.
        value: None before the first finite one.
        step: `global_step` of its validation.
    """

    name: str = ""
    value: float | None = None
    step: int | None = None

    def offer(
        self, name: str, value: float, step: int, higher_is_better: bool, by: float = 0.0
    ) -> bool:
        """Take a value if it is better by more than `by`; nan and inf never are.

        The value of another metric than before begins again.

        Returns:
            Whether it was taken.
        """
        if name != self.name:
            self.name, self.value, self.step = name, None, None
        own = rank(value, higher_is_better)
        if own is None:
            return False
        known = None if self.value is None else rank(self.value, higher_is_better)
        if known is not None and not known - own > by:
            return False
        self.value, self.step = value, step
        return True

    def __str__(self) -> str:
        if self.value is None:
            return "nan"
        return f"{self.value:g}" + ("" if self.step is None else f" (step {self.step})")

    def state_dict(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        return asdict(self)

    @classmethod
    def saved(cls, state: dict[str, Any]) -> Self:
        """Continue from what `state_dict` gave."""
        value, step = state["value"], state["step"]
        return cls(
            str(state["name"]),
            None if value is None else float(value),
            None if step is None else int(step),
        )


def much_worse(best: float, values: Sequence[float]) -> bool:
    """Whether the last value lies far from the best one, by the rule above.

    Args:
        best: of all values of the run; finite.
        values: those of the validations, the last one last; the oldest may be missing.
    """
    *_, last = values
    if not math.isfinite(last):
        return True
    known = [value for value in values if math.isfinite(value)]
    changes = [abs(b - a) for a, b in pairwise(known)]
    gap = abs(last - best)
    return bool(changes) and gap > max(
        _TIMES_THE_CHANGE * median(changes), _SHARE_OF_BEST * abs(best)
    )
