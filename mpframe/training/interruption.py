"""Signals that ask a run to stop: noted when they come, obeyed between two steps.

    SIGTERM  the system asks: shutdown, `kill`, a cluster's time limit
    SIGINT   the user asks, by Ctrl-C
    SIGUSR1  a cluster warns before its time limit; with trainer.requeue the job is put back

The first signal while a run trains is noted, and the run stops at the next point between two steps.
Before training starts there is nothing to save, and it stops at once. Further signals change
nothing, so a checkpoint that is being written is finished.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from mpframe.core.callback import Callback
from mpframe.core.errors import RunInterrupted
from mpframe.training.parallel.place import place
from mpframe.training.trainer import Trainer

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class Interruption(Callback):
    """Catches the signals within a `with` block, in the main thread only.

    As a run's last callback it ends the run between two steps, or between two validated batches,
    once all others have dealt with the step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first, on this rank or another
        self.raised = False  # whether it raised at once, and was not only noted
        self._process, self._deferring = os.getpid(), False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Only note a signal, for the end of the step, within the block."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def on_prediction_step(self, trainer: Trainer) -> None:
        """Abandon the validation if a signal came. A resumed run validates again."""
        self.on_step_end(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Raise RunInterrupted if a signal came, to this rank or to another."""
        if trainer.comm.size > 1:
            (number,) = trainer.comm.max_of([self.received or 0])
            if not number:  # A signal that came since then waits, so that all ranks stop together.
                return
            self.received = signal.Signals(number)
        if self.received is not None:
            raise RunInterrupted(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or self.received is not None:
            return  # A loader's worker, which inherited this handler, works until it is told.
        self.received = signal.Signals(number)
        if not self._deferring:
            self.raised = True
            raise RunInterrupted(self.received)
        # Not through the log: the signal may have come while that was being written.
        if place().rank == 0:
            os.write(2, f"\n{self.received.name}: stopping after this step\n".encode())
