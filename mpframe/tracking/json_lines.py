"""A run's curves as JSON: `metrics.jsonl` in its folder, one object a line for each step.

    {"step": 10, "loss/train": 2.1840832, "optim/lr": 0.001, "grad/amax": "inf"}

The names are TensorBoard's tags. JSON has no inf and nan, so they are strings, which Python's
`float` takes.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from mpframe.core.callback import Callback
from mpframe.core.step_result import StepResult
from mpframe.files.durable import AppendLog, write_atomically
from mpframe.files.plain_file import open_regular
from mpframe.tracking.logger import Logger

FILE_NAME = "metrics.jsonl"


class JsonLines(Callback, Logger):
    """Writes the line of a step when a later step was tried, or at the end of the run.

    A checkpoint holds the lines that wait. If the disk is full, `on_error` is `stop`, or `warn` to
    write what waits once there is room.
    """

    def __init__(self, on_error: str = "stop") -> None:
        self._on_error = on_error
        self._waiting: dict[int, dict[str, float]] = {}

    def setup(self, trainer: Any, context: Any) -> None:
        """Open the file without the lines of steps that a resumed run takes again."""
        path, first = context.folder / FILE_NAME, trainer.progress.global_step
        lines = _read_lines(path) if first else []
        write_atomically(path, b"".join(line for line in lines if 0 <= _step_of(line) < first))
        self._log = AppendLog(path, self._on_error)
        context.tracker.add(self)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting.setdefault(step, {}).update(values)

    def on_optimizer_step(self, trainer: Any, result: StepResult) -> None:
        """Write what came before this step, to which nothing is added any more."""
        self._write(trainer.progress.global_step)

    def teardown(self, trainer: Any, error: BaseException | None) -> None:
        self._write(math.inf)

    def state_dict(self) -> dict[str, Any]:
        return {"lines": [[step, dict(values)] for step, values in self._waiting.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = {
            int(step): {str(tag): float(value) for tag, value in values.items()}
            for step, values in state["lines"]
        }

    def _write(self, before: float) -> None:
        steps = sorted(step for step in self._waiting if step < before)
        lines = [_as_line({"step": step, **self._waiting.pop(step)}) for step in steps]
        if lines:
            self._log.append("".join(lines).encode())


def _as_line(values: Mapping[str, float]) -> str:
    shown = {tag: v if math.isfinite(v) else str(v) for tag, v in values.items()}
    return json.dumps(shown, ensure_ascii=False) + "\n"


def _read_lines(path: Any) -> list[bytes]:
    """Return the whole lines of an older file, if there is one."""
    try:
        with open_regular(path, "rb") as file:
            return [line for line in file.readlines() if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def _step_of(line: bytes) -> int:
    """Return the step of a line, or -1 if it is none of ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError):  # Anything may lie there.
        return -1
