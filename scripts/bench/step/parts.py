"""Where the time of the trainer's steps goes, method by method."""

import time
from collections.abc import Callable
from typing import Any

from bench.measure import Clock
from mpframe.core.comm import Comm
from mpframe.training.trainer import Trainer


class Parts:
    """Seconds spent in each of some methods, without what the others among them take.

    Args:
        clock: seconds.

    Attributes:
        seconds: so far, by the name of the part.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._since = clock, 0.0
        self._open: list[str] = []

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time of a method of this one object as `part`, from now on."""
        inner: Callable[..., Any] = getattr(owner, method)
        self.seconds.setdefault(part, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, method, timed)

    def _turn(self) -> None:
        """Count the time since the last turn for the innermost method that runs."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def watched(trainer: Trainer, clock: Clock = time.perf_counter) -> Parts:
    """The parts of a trainer of one optimizer, which is told its time from now on."""
    parts = Parts(clock)
    optimizer: Any = trainer.optimizer
    trainer.comm = Comm()  # Not the one that all trainers share.
    parts.watch(trainer, "forward_backward", "forward and loss")
    parts.watch(trainer.comm, "backward", "backward")
    parts.watch(optimizer.optimizer, "step", "AdamW itself")
    parts.watch(optimizer, "zero_grad", "gradients cleared")
    parts.watch(optimizer, "accumulate", "gradients collected, the largest one")
    parts.watch(optimizer, "step", "norm and verdict")
    parts.watch(optimizer, "apply", "around AdamW")
    parts.watch(trainer, "_call", "callbacks")
    parts.watch(trainer, "train_step", "rest of the step")
    parts.watch(trainer, "fit", "rest of the loop")
    return parts
