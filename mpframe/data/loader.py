"""Batches in an order that depends on (seed, epoch) alone, from any batch on.

A run that stops in the middle of an epoch goes on with `loader.epoch(epoch, start)` and sees
exactly the batches it would have seen: the order is a permutation computed from its key, not the
state of a generator, and so is each sample's augmentation (see fetch).
"""

import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpframe.data.facts import require_whole
from mpframe.data.fetch import Collate, Fetcher
from mpframe.data.keyed_random import keyed_state
from mpframe.data.workers import (
    POLL_SECONDS,
    CurrentSamples,
    EpochOrder,
    WorkerPool,
    ignore_signals,
)
from mpframe.distributed.world import ALONE, World
from mpframe.errors import ConfigError, DataError, MpframeError
from mpframe.user_code import UserCode, name_of


class Loader:
    """Batches of a map-style dataset, one epoch at a time.

    Args:
        dataset: anything with `__len__` and `__getitem__`, or `fetch_batch` (see fetch).
        batch_size: samples per batch, of all ranks together, >= 1.
        seed: decides order and augmentation, together with the epoch.
        shuffle: a new order in every epoch; otherwise the dataset's own.
        workers: processes that load; 0 loads in this one. The batches are the same.
        worker_timeout: seconds to wait for a batch of the workers, > 0; None waits for ever.
        drop_last: leave out an incomplete last batch. Training wants True, validation False.
        collate: makes a batch, any tree of tensors, of a list of samples; None: torch's
            default_collate, whose list of the parts of a tuple becomes a tuple.
        pin: batches come in pinned memory, from which a CUDA device copies in the background.
        world: the ranks that share each batch; each reads its own part of it.
        split: what the samples are for, in messages.
        option: the path of the batch size in the configuration, for messages.

    Attributes:
        waited: seconds that the caller has waited for batches so far, over all epochs.

    Raises:
        ConfigError: batch_size or workers out of range, `drop_last` would leave no batch, or the
            ranks cannot share a batch evenly.
        DataError: the dataset is empty or is not map-style, or has a `fetch_batch` beside a
            `collate`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool,
        workers: int = 0,
        worker_timeout: float | None = None,
        drop_last: bool = False,
        collate: Collate | None = None,
        pin: bool = False,
        world: World = ALONE,
        split: str = "training",
        option: str = "dataset.batch_size",
    ) -> None:
        self.size = _size_of(dataset)
        _refuse_two_collates(dataset, collate)
        require_whole(option, batch_size, least=1)
        require_whole("dataset.workers", workers, least=0)
        if drop_last and self.size < batch_size:
            raise ConfigError(
                f"{option}={batch_size}: the training set has {self.size} samples; "
                f"use {self.size} or fewer"
            )
        _refuse_uneven(option, batch_size, world)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.waited = 0.0
        self._option = option
        self._world = world
        self._order: tuple[int, Tensor] | None = None
        self._plan = _Plan()
        self._split = split
        current = CurrentSamples(workers)
        self._pool = WorkerPool(current, worker_timeout)
        with warnings.catch_warnings():
            # require_workers warns of more workers than cores, once and in one line.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            self._batches = DataLoader(
                Fetcher(dataset, seed, current, split, collate),
                batch_sampler=self._plan,
                num_workers=workers,
                pin_memory=pin,
                collate_fn=_unchanged,
                persistent_workers=workers > 0,
                timeout=POLL_SECONDS if workers else 0,
                worker_init_fn=ignore_signals,
                # Without its own it would draw from the global generator, which is the model's.
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        """Batches per epoch."""
        if self.drop_last:
            return self.size // self.batch_size
        return -(-self.size // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of `epoch`, from number `start` on.

        A loader reads one epoch at a time: asking for another ends the one before.

        Args:
            epoch: >= 0.
            start: the first batch wanted, 0 to `len(self)`.

        Returns:
            This rank's part of each; None where the last batch has fewer samples than there are
            ranks, and none for this one.

        Raises:
            DataError: `start` lies outside the epoch; or, while reading, a sample cannot be read
                or holds NaN or inf, or samples make no batch.
        """
        if not 0 <= start <= len(self):
            raise DataError(
                f"{self._option}={self.batch_size}: an epoch has {len(self)} batches and cannot "
                f"start at batch {start}; use the batch size and the data the run began with"
            )
        return self._read(epoch, start)

    def batch_ids(self, epoch: int, batch: int) -> Tensor:
        """The dataset's indices of the samples in this rank's part of a batch, in their order.

        Returns:
            [N] int64.
        """
        first = batch * self.batch_size
        return self._world.part(self._order_of(epoch)[first : first + self.batch_size])

    def close(self) -> None:
        """End the workers. Nothing is read afterwards."""
        self._pool.close()

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        numbers = range(start, len(self))
        order = EpochOrder(self._split, epoch, self._order_of(epoch), self.batch_size)
        requests = _requests(order, numbers, self._world)
        self._plan.requests = requests
        asked = perf_counter()
        answers = self._pool.start(self._batches)
        for _ in numbers:
            if self._plan.requests is not requests:
                raise RuntimeError(f"epoch {epoch} was ended: the loader has begun another epoch")
            batch = _batch_or_raise(self._pool.next_batch(answers, order))
            self.waited += perf_counter() - asked
            yield batch
            asked = perf_counter()

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            size = self.size
            order = shuffled(size, self.seed, epoch) if self.shuffle else torch.arange(size)
            self._order = epoch, order
        return self._order[1]


def shuffled(size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch of `size` samples: [size] int64, from the seed and the epoch alone."""
    key = int(keyed_state(seed, epoch)[0])
    return torch.randperm(size, generator=torch.Generator().manual_seed(key))


class _Plan:
    """The requests of the epoch being read: a DataLoader keeps one sampler for ever."""

    def __init__(self) -> None:
        self.requests: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.requests


def _requests(order: EpochOrder, numbers: range, world: World) -> Iterator[list[int]]:
    # This is no method: a generator that holds the loader would make a reference cycle, and the
    # loader's workers would live until the garbage collector runs, perhaps in a new worker.
    size = order.batch_size
    for number in numbers:
        indices = world.part(order.indices[number * size : (number + 1) * size])
        yield [order.epoch, number, *indices.tolist()]


def _batch_or_raise(answer: Any) -> Any:
    if isinstance(answer, MpframeError):
        try:
            raise answer
        finally:
            del answer  # It would be such a cycle, too: error, traceback, this frame, error.
    return answer


def _refuse_uneven(option: str, batch_size: int, world: World) -> None:
    rest = batch_size % world.size
    if rest:
        raise ConfigError(
            f"{option}={batch_size}: {world.size} ranks share each batch; use a multiple of "
            f"{world.size}, as {batch_size - rest + world.size}"
        )


def _unchanged(batch: Any) -> Any:
    return batch


def _size_of(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"dataset: {type(dataset).__name__} has no __len__ and __getitem__; "
            "give a map-style dataset (a stream cannot be resumed exactly)"
        )
    with UserCode("dataset: the __len__ of", dataset):
        size = len(dataset)
    if size == 0:
        raise DataError(f"dataset: {type(dataset).__name__} has no samples; give at least one")
    return size


def _refuse_two_collates(dataset: Any, collate: Collate | None) -> None:
    if collate is not None and hasattr(dataset, "fetch_batch"):
        raise DataError(
            f"dataset: {type(dataset).__name__} makes whole batches by its fetch_batch, and its "
            f"Task has the collate {name_of(collate)}; give one of the two"
        )
