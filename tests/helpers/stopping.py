"""A callback that signals its own process in the middle of one job of a sweep."""

import os
import signal

from mpframe import Trainer
from mpframe.core.callback import Callback


class Stop(Callback):
    """Sends the signal that the variable STOP names, in the job with seed 2."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_step_end(self, trainer: Trainer) -> None:
        name = os.environ.get("STOP")
        if name and self.seed == 2 and trainer.progress.global_step == 4:
            os.kill(os.getpid(), signal.Signals[name])
