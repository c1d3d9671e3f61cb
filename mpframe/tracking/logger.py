"""Where a run's results go: the interface `Logger`. TensorBoard's is tracker.py.

A callback adds another in its `setup`, with `context.tracker.add(logger)`. docs/tensorboard.md has
an example.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
