"""The share of a stream that one worker of one rank reads, and how far it has read it.

Every sample is in exactly one share. A stream that can split itself does so; of any other, each
worker reads everything and keeps every n-th sample. A share begins again when it ends, as often as
batches are asked for. Its next batch depends only on its `Place`, so that a resumed run gets the
batches it would have got: the stream's own state if it has one, or else a number of samples, which
are read over again.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from mpframe.core.errors import DataError, MpframeError
from mpframe.data.fetching import (
    Collate,
    blame_data,
    checked,
    keep_generators,
    seed_generators,
    stack,
)
from mpframe.data.samples import hash_key
from mpframe.data.workers import CurrentSamples

_END = object()


class Place(NamedTuple):
    """How far a share was read: `read` samples of a pass over the stream."""

    number: int = 0  # of the pass
    read: int = 0  # samples, those of other shares included if this worker skips them itself
    state: Any = None  # the stream's own state, or None


@dataclass(frozen=True)
class Reading:
    """How a stream is read, by all ranks and workers."""

    batch_size: int  # of this rank
    seed: int
    rank: int
    ranks: int
    workers: int  # at least 1
    split: str
    collate: Collate | None
    endless: bool  # or one pass

    def share(self, worker: int) -> tuple[int, int]:
        """Return the number of a worker's share, and how many there are."""
        return self.rank * self.workers + worker, self.ranks * self.workers


class Shares(IterableDataset[Any]):
    """Batches of each worker in turn, each with the place after it.

    Args:
        stream: the samples.
        reading: how they are read.
        first: the number of the first batch. Workers before its own begin with None.
        places: where each worker begins.
        current: where each worker notes the sample it is reading.
    """

    def __init__(
        self,
        stream: Any,
        reading: Reading,
        first: int,
        places: list[Place],
        current: CurrentSamples,
    ) -> None:
        self._stream, self._reading, self._current = stream, reading, current
        self._first, self._places = first, places

    def __iter__(self) -> Iterator[Any]:
        """Yield (batch, place), or the error that ends this share."""
        info, reading = get_worker_info(), self._reading
        worker = 0 if info is None else info.id
        if worker < self._first % reading.workers:
            yield None
        share = _Share(self._stream, reading, worker, self._current)
        try:
            with keep_generators():
                share.seek(self._places[worker])
            for number in range(2**63):
                with keep_generators():
                    batch = share.batch(number)
                if batch is None:
                    return
                self._current.note()
                yield batch, share.place
        except MpframeError as error:  # Raised in a worker, it would be wrapped in a traceback.
            yield error


class _Share:
    def __init__(self, stream: Any, reading: Reading, worker: int, current: CurrentSamples) -> None:
        self._stream, self._reading, self._current = stream, reading, current
        self._number, self._of = reading.share(worker)
        self._pass, self._read, self._found = 0, 0, 0

    @property
    def place(self) -> Place:
        state = copy.deepcopy(self._view.state_dict()) if has_exact_state(self._view) else None
        return Place(self._pass, self._read, state)

    def seek(self, place: Place) -> None:
        """Go on from a place."""
        self._open(place.number)
        self._found = 1  # That a pass has samples is asked of a whole one.
        if place.state is not None:
            self._view.load_state_dict(copy.deepcopy(place.state))
            self._iterator, self._read = iter(self._view), place.read
        while self._read < place.read:
            self._next()
        if place.read == 0:
            self._found = 0

    def batch(self, number: int) -> Any:
        """Return the next batch, or None after the only pass."""
        indices, samples = [], []
        while len(samples) < self._reading.batch_size:
            sample = self._next()
            if sample is not _END:
                indices.append(self._read - 1)
                samples.append(sample)
            elif self._reading.endless:
                self._begin_again()
            else:
                break
        if not samples:
            return None
        batch = stack(samples, indices, self._reading.collate)
        return checked(batch, indices, self._reading.split, (self._pass, number), samples)

    def _begin_again(self) -> None:
        if not self._found:
            raise DataError(
                f"dataset: {type(self._stream).__name__} gave no sample in share {self._number} "
                f"of {self._of} (ranks x workers); give it more shards, or use fewer "
                "dataset.workers"
            )
        self._open(self._pass + 1)

    def _open(self, number: int) -> None:
        blamed = f"pass {number} over {type(self._stream).__name__} cannot be read"
        with blame_data(blamed), self._hidden():
            self._view = self._view_of(number)
            self._iterator = iter(self._view)
        self._pass, self._read, self._found = number, 0, 0

    def _view_of(self, number: int) -> Any:
        """Return the stream in a pass, of this share only if it can split itself."""
        view, share = self._stream, (self._number, self._of)
        if is_one_shot(view):
            return view
        if comes_from("datasets", view):
            from datasets.distributed import split_dataset_by_node

            view = split_dataset_by_node(view, *share)
        elif can_shard(view):
            view = copy.copy(view).shard(num_shards=share[1], index=share[0])
        else:
            view = copy.copy(view)
        if hasattr(view, "set_epoch"):
            takes_seed = len(inspect.signature(view.set_epoch).parameters) > 1
            view.set_epoch(*[self._reading.seed] * takes_seed, number)
        return view

    def _next(self) -> Any:
        """Return the next sample of this share."""
        whole = not (splits_itself(self._stream) or can_shard(self._stream))
        while True:
            number = self._read
            self._current.note(number)
            seed_generators(self._key(number))
            with blame_data(f"sample {number} cannot be read"), self._hidden():
                sample = next(self._iterator, _END)
            if sample is _END:
                return sample
            self._read += 1
            if not whole or number % self._of == self._number:
                self._found += 1
                return sample

    def _key(self, number: int) -> int:
        return int(hash_key(self._reading.seed, self._pass, number, self._number)[0])

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide that this is a worker from a stream that would split itself by it once more."""
        info: Any = torch_worker._worker_info
        if not splits_by_worker(self._stream):
            torch_worker._worker_info = None
        try:
            yield
        finally:
            torch_worker._worker_info = info


def comes_from(package: str, stream: Any) -> bool:
    """Whether a class of a package made the stream, found without importing the package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(stream).__mro__)


def splits_by_worker(stream: Any) -> bool:
    """Whether the stream finds its rank and worker itself."""
    return comes_from("webdataset", stream) or getattr(stream, "splits_itself", False)


def can_shard(stream: Any) -> bool:
    """Whether `stream.shard(num_shards, index)` is a share."""
    return hasattr(stream, "shard") and not splits_by_worker(stream)


def splits_itself(stream: Any) -> bool:
    """Whether no sample of the stream has to be left out."""
    return splits_by_worker(stream) or comes_from("datasets", stream)


def is_one_shot(stream: Any) -> bool:
    """Whether the stream can be read only once, so that nothing can go back in it."""
    return not getattr(stream, "resumable", True) or isinstance(stream, Iterator)


def has_exact_state(view: Any) -> bool:
    """Whether the stream's state brings back all of it. A shuffle buffer of datasets is lost."""
    if not hasattr(view, "load_state_dict") or not hasattr(view, "state_dict"):
        return False
    source = getattr(view, "_ex_iterable", None)
    while source is not None:
        if "Shuffled" in type(source).__name__:
            return False
        source = getattr(source, "ex_iterable", None)
    return True
