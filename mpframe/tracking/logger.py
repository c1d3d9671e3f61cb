"""Where a run's results go: the interface `Logger`, and all loggers of a run as one, `Loggers`.

TensorBoard's is tracker.py. A callback adds another in its `setup`, with
`context.tracker.add(logger)`. docs/tensorboard.md has an example.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from mpframe.core.user_code import blame, describe_error, name_of

log = logging.getLogger(__name__)

Numbers = Sequence[float]


class Logger:
    """Receives results by tag (tags.py has them all). Each method does nothing here."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers, among them inf and nan. A step may come in several calls."""

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Log an encoded PNG. Its step may be earlier than the last scalars'."""

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        """Log counts [n], not all 0, between edges [n + 1]. No scalar has the same tag."""

    def text(self, tag: str, markdown: str) -> None:
        """Log a page of Markdown. A resumed run logs it again."""

    def options(self, values: Mapping[str, Any]) -> None:
        """Log what runs are compared by, no secrets: bool, int, float, str, None, or lists."""

    def flush(self) -> None:
        """Wait until all that was logged is stored, before a checkpoint."""

    def close(self, error: BaseException | None = None) -> None:
        """The run has ended, by the error if there is one."""


class Loggers(Logger):
    """Gives each result to TensorBoard's `Tracker`, then to the others. It is a context manager."""

    def __init__(self, tensorboard: Any) -> None:
        self.tensorboard = tensorboard
        self._loggers: dict[Logger, str] = {tensorboard: "stop"}
        self._texts: dict[str, str] = {}
        self._options: Mapping[str, Any] = {}

    def add(self, logger: Logger, on_error: str = "stop") -> None:
        """Give a logger the results from now on, and the texts and options so far.

        If it raises, on_error `stop` ends the run, and `warn` only the logging to it.
        """
        self._loggers[logger] = on_error
        for tag, markdown in self._texts.items():
            self._call(logger, "text", tag, markdown)
        self._call(logger, "options", self._options)

    def scalars(self, step: int, values: Mapping[str, float | Tensor]) -> None:
        """Log numbers or 0-d tensors by tag at `step`, which grows from call to call.

        Here the host waits for the tensors: there is one transfer for each device.
        """
        self._call_all("scalars", step, _to_numbers(values))

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._call_all("image", tag, png, step)

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        self._call_all("histogram", tag, counts, edges, step)

    def text(self, tag: str, markdown: str) -> None:
        self._texts[str(tag)] = markdown
        self._call_all("text", str(tag), markdown)

    def options(self, values: Mapping[str, Any]) -> None:
        self._options = values
        self._call_all("options", values)

    def flush(self) -> None:
        self._call_all("flush")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # The first error is the one to report.
            self._loggers = dict.fromkeys(self._loggers, "warn")
        with ExitStack() as stack:  # It closes each, also if another cannot be closed.
            for logger in self._loggers:
                stack.callback(self._call, logger, "close", error)

    def _call_all(self, method: str, *arguments: Any) -> None:
        for logger in list(self._loggers):
            self._call(logger, method, *arguments)

    def _call(self, logger: Logger, method: str, *arguments: Any) -> None:
        if logger not in self._loggers:
            return
        try:
            getattr(logger, method)(*arguments)
        except Exception as error:
            if self._loggers[logger] != "warn":
                blame("logger", logger)
            del self._loggers[logger]
            said = f"logger {name_of(logger)} raised {describe_error(error)}"
            log.warning("warning: %s; the run goes on without it", said)


def _to_numbers(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    tensors = {str(tag): value for tag, value in values.items() if isinstance(value, Tensor)}
    numbers = {str(tag): float(value) for tag, value in values.items() if tag not in tensors}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {tag: t.float() for tag, t in tensors.items() if t.device == device}
        numbers.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return numbers
