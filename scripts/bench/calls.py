"""How many Python calls a step makes: what a reader has to follow, and what a tiny step waits for.

Counted is every call of a function in mpframe/, comprehensions included, outside the casts: what
they do, and whatever they call, depends on the model's ops. The model is the
tiny step's, with AdamW and Backoff, one micro-batch and no callback.
"""

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import mpframe
from mpframe.training.trainer import Trainer

_PACKAGE = str(Path(mpframe.__file__).parent)
_CASTS = tuple(str(Path(_PACKAGE, part)) for part in ("precision", "core/casts.py"))


def calls_of_a_step(trainer: Trainer, batch: Any) -> int:
    """The calls of `trainer.train_step(batch)`, after two steps that are not counted."""
    for _ in range(2):  # The first one makes the optimizer's state.
        trainer.train_step(batch)
    counter = _Counter()
    before = sys.getprofile()
    gc.collect()
    gc.disable()  # Or it might call what waits for the end of another test's objects.
    sys.setprofile(counter)
    try:
        trainer.train_step(batch)
    finally:
        sys.setprofile(before)
        gc.enable()
    return counter.calls


class _Counter:
    """Counts calls, for `sys.setprofile`."""

    def __init__(self) -> None:
        self.calls = 0
        self._below_casts = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if self._below_casts or file.startswith(_CASTS):
                self._below_casts += 1
            elif file.startswith(_PACKAGE):
                self.calls += 1
        elif event == "return" and self._below_casts:
            self._below_casts -= 1
