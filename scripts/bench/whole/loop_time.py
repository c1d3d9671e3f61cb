"""How long the loop of a run took: from before the first step to the end of the last validation."""

from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Self


@dataclass(frozen=True)
class LoopTime:
    """Two clocks: of the wall, and of the processor, which other load disturbs less."""

    seconds: float  # that passed
    cpu_seconds: float  # that this process computed, in all its threads

    @classmethod
    def now(cls) -> Self:
        """Read both clocks."""
        return cls(perf_counter(), process_time())

    def since(self, began: Self) -> Self:
        """Return the time since `began`."""
        return type(self)(self.seconds - began.seconds, self.cpu_seconds - began.cpu_seconds)
