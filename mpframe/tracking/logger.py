"""The interface `Logger`: a place that a run's results go to.

TensorBoard's is tracker.py, and loggers.py gives every result to all loggers of a run. A callback
adds one in its `setup` with `context.tracker.add(logger)`. docs/tensorboard.md has an example.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class Logger:
    """Receives a run's results. Each method does nothing here, so write those that you need.

    A tag is a path such as `loss/train`. tags.py has all of them, with their meanings.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by tag. A step may come in several calls, and inf and nan are numbers."""

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Log a picture, an encoded PNG. `step` may be an earlier one than the last scalars'."""

    def histogram(
        self, tag: str, counts: Sequence[float], edges: Sequence[float], step: int
    ) -> None:
        """Log counts [n], not all 0, between edges [n + 1]. `step` is as for a picture."""

    def text(self, tag: str, markdown: str) -> None:
        """Log a page of Markdown. A resumed run logs it again."""

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        """Log the options by which runs are compared, without secrets.

        Args:
            config: option path -> bool, int, float, str, None, or a list of these.
            metrics: the tags that are a run's results.
            first: the keys to show first, because runs differ in them.
        """

    def flush(self) -> None:
        """Wait until all that was logged is stored. A checkpoint is about to be taken."""

    def close(self, error: BaseException | None = None) -> None:
        """The run has ended, by `error` if it is not None, and logs nothing further."""
