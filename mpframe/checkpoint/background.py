"""One piece of work at a time on a thread of its own; what fails there is raised here."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class Background:
    """At most one piece of work is under way; use as a context manager, or call `close`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start `work`, after waiting for what is under way.

        Raises:
            Exception: what the work before raised; then `work` is not started.
        """
        self.wait()
        self._under_way = self._threads.submit(work)

    def wait(self) -> None:
        """Wait for what is under way, and raise what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait, raise, and end the thread."""
        try:
            self.wait()
        finally:
            self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
