"""The interface of a data loader, as the trainer uses it."""

from collections.abc import Iterator
from typing import Any, Protocol

Batch = Any
"""Any tree of tensors that the run's objective takes, e.g. (inputs, targets) or a dict."""


class Loader(Protocol):
    """Batches of a dataset in an order that depends on the epoch alone."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch number `start` on."""
