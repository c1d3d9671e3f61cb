"""How long the loop of a run took: from before the first step to the end of the last validation."""

from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Self


@dataclass(frozen=True)
class LoopTime:
    """Two clocks: of the wall, and of the processor, which other load disturbs less.

    Attributes:
        seconds: that passed.
        cpu_seconds: that this process computed, in all its threads.
    """

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> Self:
        """What both clocks show."""
        return cls(perf_counter(), process_time())

    def since(self, began: Self) -> Self:
        """What has passed since `began`."""
        return type(self)(self.seconds - began.seconds, self.cpu_seconds - began.cpu_seconds)
