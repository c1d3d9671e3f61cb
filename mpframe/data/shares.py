"""The share of a stream that one worker of one rank reads.

Every sample is in exactly one share. A stream that can split itself does so. Of any other, each
worker reads all samples and keeps every n-th. A share begins again when it ends, as often as
batches are needed.

The next batch depends only on the `Place` that was reached: the stream's own state if it has one,
or else a number of samples, which are read again. Random numbers of a sample depend on its place.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from mpframe.core.errors import DataError, MpframeError
from mpframe.data.fetching import (
    Collate,
    blame_data,
    keep_generators,
    require_finite,
    seed_generators,
    stack,
)
from mpframe.data.samples import hash_key
from mpframe.data.workers import CurrentSamples

_END = object()


class Place(NamedTuple):
    """How far a share was read."""

    number: int = 0  # of the pass over the stream
    read: int = 0  # samples of this pass, or batches of a DataLoader
    state: Any = None  # the stream's own, if it has one


@dataclass(eq=False)
class Shares(IterableDataset[Any]):
    """Batches of this worker's share, each with the `Place` after it, or the error that ends it."""

    stream: Any  # samples, or a DataLoader's batches
    batch_size: int  # of this rank
    seed: int
    rank: int
    ranks: int
    workers: int  # at least 1
    split: str
    collate: Collate | None
    endless: bool  # or a single pass
    current: CurrentSamples  # where each worker notes the sample it is reading
    first: int = 0  # the number of the first batch. Workers whose turn is past begin with None.
    places: Sequence[Place] = ()  # where each worker begins

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        self._view: Any = None
        self._iterator: Iterator[Any] = iter(())
        if worker < self.first % self.workers:
            yield None
        self._of, self._number = self.ranks * self.workers, self.rank * self.workers + worker
        self._finds_its_worker = comes_from("webdataset", self.stream) or getattr(
            self.stream, "splits_itself", False
        )
        self._has_shard = hasattr(self.stream, "shard") and not self._finds_its_worker
        self._keeps_all = self._finds_its_worker or self._has_shard or is_batched(self.stream)
        self._keeps_all |= comes_from("datasets", self.stream)
        try:
            with keep_generators():
                self._seek(self.places[worker])
            while True:
                with keep_generators():
                    batch = self._batch()
                self.current.note()
                if batch is None:
                    return
                yield batch, Place(self._pass, self._read, _state_of(self._view))
        except MpframeError as error:  # Raised in a worker, it would be wrapped in a traceback.
            yield error

    def _seek(self, place: Place) -> None:
        self._open(place.number)
        if place.state is not None:
            self._read = place.read
            with self._reading(f"the state of {type(self.stream).__name__}"):
                self._view.load_state_dict(copy.deepcopy(place.state))
                self._iterator = iter(self._view)
        while self._read < place.read and self._next() is not _END:
            pass
        self._empty = place.read == 0  # Nothing is known of the rest of a pass.

    def _open(self, number: int) -> None:
        """Begin a pass."""
        self._pass, self._read, self._empty = number, 0, True
        with self._reading(f"pass {number} over {type(self.stream).__name__}"):
            self._view = self._view_of(number)
            self._iterator = iter(self._view)

    def _view_of(self, number: int) -> Any:
        """Return the stream in a pass, of this share only if it can split itself."""
        view = self.stream if is_one_shot(self.stream) else copy.copy(self.stream)
        if comes_from("datasets", view):
            from datasets.distributed import split_dataset_by_node

            view = split_dataset_by_node(view, self._number, self._of)
        elif comes_from("webdataset", view):
            view = copy.deepcopy(self.stream)
            for stage in view.pipeline:
                if hasattr(stage, "epoch"):  # detshuffle's, which counts the passes itself
                    stage.epoch = number - 1
        elif self._has_shard:
            view = view.shard(num_shards=self._of, index=self._number)
        if hasattr(view, "set_epoch"):
            takes_seed = len(inspect.signature(view.set_epoch).parameters) > 1
            view.set_epoch(*[self.seed] * takes_seed, number)
        return view

    def _batch(self) -> Any:
        """Return the next batch, or None after a single pass."""
        samples: list[Any] = []
        indices: list[int] = []
        size = 1 if is_batched(self.stream) else self.batch_size
        while len(samples) < size:
            sample = self._next()
            if sample is not _END:
                samples.append(sample)
                indices.append(self._read - 1)
            elif not self.endless:
                break
            elif self._empty:
                raise DataError(
                    f"dataset: {type(self.stream).__name__} has no sample for worker "
                    f"{self._number} of {self._of} (all ranks together); use fewer "
                    "dataset.workers, or give it more samples or shards"
                )
            else:
                self._open(self._pass + 1)
        if not samples:
            return None
        if is_batched(self.stream):
            batch = samples[0]  # torch's list of the parts of a tuple becomes a tuple.
            batch = tuple(batch) if type(batch) is list else batch
            place = self._pass, indices[0]
            return require_finite(batch, range(self.batch_size), self.split, place, ())
        place = self._pass, indices[-1] // self.batch_size
        batch = stack(samples, indices, self.collate)
        return require_finite(batch, indices, self.split, place, samples)

    def _next(self) -> Any:
        """Return the next sample of this share, or _END."""
        while True:
            number = self._read
            self.current.note(number)
            with self._reading(f"sample {number}"):
                sample = next(self._iterator, _END)
            if sample is _END:
                return sample
            self._read += 1
            if self._keeps_all or number % self._of == self._number:
                self._empty = False
                return sample

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Name what cannot be read, seed its random numbers, and hide the worker if need be."""
        seed_generators(int(hash_key(self.seed, self._pass, self._read, self._number)[0]))
        info: Any = torch_worker._worker_info
        if not self._finds_its_worker:  # or the stream might split itself again
            torch_worker._worker_info = None
        try:
            with blame_data(f"{what} cannot be read"):
                yield
        finally:
            torch_worker._worker_info = info


def comes_from(package: str, stream: Any) -> bool:
    """Whether a class of a package made the stream. The package is not imported."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(stream).__mro__)


def is_batched(stream: Any) -> bool:
    """Whether the stream gives this rank's batches instead of samples."""
    return isinstance(stream, DataLoader)


def is_one_shot(stream: Any) -> bool:
    """Whether nothing can go back in the stream: an iterator, or one with `resumable = False`."""
    return not getattr(stream, "resumable", True) or isinstance(stream, Iterator)


def _state_of(view: Any) -> Any:
    """Return the stream's state, or None if it has none that brings back all of it."""
    if not hasattr(view, "load_state_dict") or not hasattr(view, "state_dict"):
        return None
    source = getattr(view, "_ex_iterable", None)  # of datasets, whose shuffle buffer is lost
    while source is not None:
        if "BufferShuffled" in type(source).__name__:
            return None
        source = getattr(source, "ex_iterable", None)
    return copy.deepcopy(view.state_dict())
