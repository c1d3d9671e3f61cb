"""A run's curves as JSON: `metrics.jsonl` in its folder, one object a line for each step.

    {"step": 10, "loss/train": 2.1840832, "optim/lr": 0.001, "grad/amax": "inf"}

The names are TensorBoard's tags. JSON has no inf and nan, so they are strings.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.files.durable import append_whole, write_atomically
from mpframe.tracking.logger import Logger
from mpframe.tracking.records import read_lines
from mpframe.tracking.summary import strict_json

FILE_NAME = "metrics.jsonl"


class JsonLines(Callback, Logger):
    """Writes the line of a step when a later one was tried. A checkpoint holds what waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, float]] = {}

    def setup(self, trainer: Any, context: Any) -> None:
        """Open the file without the lines of steps that a resumed run takes again."""
        self._path, first = context.folder / FILE_NAME, trainer.progress.global_step
        lines = read_lines(self._path) if first else []
        kept = [line for line in lines if 0 <= _step_of(line) < first]
        write_atomically(self._path, b"".join(kept))
        context.tracker.add(self)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting.setdefault(step, {}).update(values)

    def on_optimizer_step(self, trainer: Any, result: StepResult) -> None:
        self._write(trainer.progress.global_step)

    def teardown(self, trainer: Any, error: BaseException | None) -> None:
        self._write(math.inf)

    def state_dict(self) -> dict[str, Any]:
        return {"lines": [[step, dict(values)] for step, values in self._waiting.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for step, values in state["lines"]:
            self.scalars(int(step), {str(tag): float(value) for tag, value in values.items()})

    def _write(self, before: float) -> None:
        steps = sorted(step for step in self._waiting if step < before)
        lines = [strict_json({"step": step, **self._waiting[step]}, None) for step in steps]
        if lines:
            append_whole(self._path, "".join(lines).encode())
        for step in steps:  # If there was no room, they wait on.
            del self._waiting[step]


def _step_of(line: bytes) -> int:
    """Return the step of a line, or -1 if it has none: anything may lie there."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return -1
