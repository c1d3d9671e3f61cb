"""Batches in an order that depends only on (seed, epoch), from any batch on.

A run that stops in the middle of an epoch goes on with `loader.epoch(epoch, start)` and sees
exactly the batches it would have seen. The order is a permutation computed from its key, and so are
all random numbers, such as the augmentation of a sample: pure functions of (seed, epoch, sample).
"""

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, DataError, MpframeError
from mpframe.core.ranges import require_whole
from mpframe.core.user_code import name_of, user_code
from mpframe.data.fetching import Collate, Fetcher
from mpframe.data.samples import hash_key
from mpframe.data.workers import POLL_SECONDS, CurrentSamples, WorkerPool, ignore_signals


class Loader:
    """Batches of a map-style dataset, one epoch at a time.

    Args:
        dataset: anything with `__len__`, and `__getitem__` or `fetch_batch`.
        batch_size: samples per batch of all ranks together, >= 1.
        seed: decides order and augmentation, together with the epoch.
        shuffle: whether every epoch has a new order, or the dataset's.
        workers: processes that load, 0 for this one. The batches are the same.
        worker_timeout: seconds to wait for a batch of the workers, > 0. None waits for ever.
        drop_last: leave out an incomplete last batch. Training wants True, validation False.
        collate: makes a batch, any tree of tensors, of a list of samples. None is torch's
            default_collate, whose list of the parts of a tuple becomes a tuple.
        pin: batches come in pinned memory, from which a CUDA device copies in the background.
        comm: the ranks that share each batch. Each reads its part.
        split, option: what the samples are for, and the path of the batch size, for messages.

    Attributes:
        waited: seconds that the caller has waited for batches so far, over all epochs.

    ConfigError: an argument is out of range, or more ranks than samples share a batch. DataError:
    the dataset is empty, not map-style, or has a `fetch_batch` beside a `collate`.
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
        comm: Comm = SINGLE_PROCESS,
        split: str = "training",
        option: str = "dataset.batch_size",
    ) -> None:
        self.size = _size_of(dataset)
        if collate is not None and hasattr(dataset, "fetch_batch"):
            raise DataError(
                f"dataset: {type(dataset).__name__} makes whole batches by its fetch_batch, and "
                f"its Task has the collate {name_of(collate)}; give one of the two"
            )
        require_shared(option, batch_size, workers, comm)
        if drop_last and self.size < batch_size:
            raise ConfigError(
                f"{option}={batch_size}: the training set has {self.size} samples; use {self.size} "
                "or fewer"
            )
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.drop_last, self.waited = drop_last, 0.0
        self._option, self._comm, self._split = option, comm, split
        self._order: tuple[int, Tensor] | None = None
        self._requests = _Requests()
        current = CurrentSamples(workers)
        self._pool = WorkerPool(current, worker_timeout)
        self._batches = data_loader(
            Fetcher(dataset, seed, current, split, collate),
            workers,
            pin,
            batch_sampler=self._requests,
        )

    def __len__(self) -> int:
        """Count the batches of an epoch."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return this rank's part of the batches of `epoch`, from number `start` (0 to len) on.

        A part is None if a short last batch leaves this rank without samples. Asking for another
        epoch ends this one. DataError: a sample cannot be read or holds NaN or inf, or samples make
        no batch.
        """
        if not 0 <= start <= len(self):
            raise DataError(
                f"{self._option}={self.batch_size}: an epoch has {len(self)} batches and cannot "
                f"start at batch {start}; use the batch size and the data the run began with"
            )
        return self._read(epoch, start)

    def batch_ids(self, epoch: int, batch: int) -> Tensor:
        """Return the indices [N] int64 of this rank's part of a batch, in order."""
        first = batch * self.batch_size
        return share_of(self._order_of(epoch)[first : first + self.batch_size], self._comm)

    def require_resumable(self, option: str) -> None:
        """Refuse data in which a resumed run cannot go back, naming the option. Here none is."""

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        numbers = range(start, len(self))
        order, size = self._order_of(epoch), self.batch_size
        self._requests.left = requests = _requests_of(epoch, order, size, numbers, self._comm)
        locate = partial(self._locate_in_epoch, epoch)
        asked = perf_counter()
        answers = self._pool.start(self._batches)
        for _ in numbers:
            if self._requests.left is not requests:
                raise RuntimeError(f"epoch {epoch} was ended: the loader has begun another epoch")
            batch = batch_or_raise(self._pool.next_batch(answers, locate))
            self.waited += perf_counter() - asked
            yield batch
            asked = perf_counter()

    def _locate_in_epoch(self, epoch: int, index: int | None) -> str:
        """Say where in an epoch a sample is."""
        if index is None:
            return f"no sample ({self._split}, epoch {epoch})"
        batch = int((self._order_of(epoch) == index).nonzero()[0]) // self.batch_size
        return f"{self._split} sample {index} (epoch {epoch}, batch {batch})"

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            size = self.size
            order = shuffle_indices(size, self.seed, epoch) if self.shuffle else torch.arange(size)
            self._order = epoch, order
        return self._order[1]


def share_of(batch: Tensor, comm: Comm) -> Tensor:
    """Return this rank's share of a global batch [N]: contiguous, sizes differ by <= 1."""
    count, rank, size = len(batch), comm.data_rank, comm.data_size
    return batch[count * rank // size : count * (rank + 1) // size]


def require_shared(option: str, batch_size: int, workers: int, comm: Comm) -> None:
    """Check the batch size, of which each rank needs a sample, and the number of workers."""
    require_whole(option, batch_size, least=1)
    require_whole("dataset.workers", workers, least=0)
    if batch_size < (ranks := comm.data_size):
        raise ConfigError(
            f"{option}={batch_size}: {ranks} ranks share each batch, and each needs a sample; use "
            f"{ranks} or more"
        )


def data_loader(dataset: Dataset[Any], workers: int, pin: bool, **options: Any) -> DataLoader[Any]:
    """Return torch's loader of whole batches, whose workers stay from one epoch to the next."""
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_keep_whole,
        persistent_workers=workers > 0,
        timeout=POLL_SECONDS if workers else 0,
        worker_init_fn=ignore_signals,
        # The default is the global generator, from which the model draws.
        generator=torch.Generator(),
        **options,
    )


def shuffle_indices(size: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch, [size] int64, from seed and epoch only."""
    key = int(hash_key(seed, epoch)[0])
    return torch.randperm(size, generator=torch.Generator().manual_seed(key))


class _Requests:
    """The requests of the epoch being read, as a DataLoader keeps one sampler for ever."""

    left: Iterator[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        return self.left


def _requests_of(
    epoch: int, order: Tensor, size: int, numbers: range, comm: Comm
) -> Iterator[list[int]]:
    # Not a method: a generator that holds the loader would make a reference cycle, and the workers
    # would live until the garbage collector runs, perhaps in a new worker.
    for number in numbers:
        indices = share_of(order[number * size : (number + 1) * size], comm)
        yield [epoch, number, *indices.tolist()]


def batch_or_raise(answer: Any) -> Any:
    if isinstance(answer, MpframeError):
        try:
            raise answer
        finally:
            del answer  # It would be a cycle as well: error, traceback, this frame.
    return answer


def _keep_whole(batch: Any) -> Any:
    return batch


def _size_of(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"dataset: {type(dataset).__name__} has no __len__ and __getitem__; "
            "give a map-style dataset, or a stream to a StreamLoader"
        )
    with user_code("dataset: the __len__ of", dataset):
        size = len(dataset)
    if size == 0:
        raise DataError(f"dataset: {type(dataset).__name__} has no samples; give at least one")
    return size
