"""What the trainer asks of a loader."""

from collections.abc import Iterator
from typing import Any, Protocol

Batch = tuple[Any, Any]


class Loader(Protocol):
    """Batches of a dataset in an order that depends on the epoch alone."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch number `start` on."""
