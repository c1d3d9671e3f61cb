"""Where the time of a step goes: forward, backward, the optimizer's step."""

import time

from bench.measure import Clock

LAPS = ("forward", "backward", "step")


class Laps:
    """Seconds by the name of the lap, summed over steps.

    Args:
        clock: seconds.

    Attributes:
        seconds: of each of `LAPS` so far.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock, self._since = clock, 0.0
        self.clear()

    def clear(self) -> None:
        """Forget the steps so far."""
        self.seconds = dict.fromkeys(LAPS, 0.0)

    def start(self) -> None:
        """A step begins."""
        self._since = self._clock()

    def end(self, name: str) -> None:
        """The lap `name` ends, and the next one begins."""
        now = self._clock()
        self.seconds[name] += now - self._since
        self._since = now
