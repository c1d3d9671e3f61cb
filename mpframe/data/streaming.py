"""Batches of a stream: of samples that come one after the other, more than a run may ever read.

An epoch is a number of batches. The next one goes on where the stream stood. A checkpoint keeps the
place behind the batch that was used last, whatever workers have read ahead, and a resumed run reads
that batch once more to see that the stream is still the same. shares.py has what a worker does.
"""

import zlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpframe.core.callback import Callback
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import CheckpointError, ConfigError, DataError
from mpframe.core.ranges import require_whole
from mpframe.core.tree import tensors_in
from mpframe.data.fetching import (
    Collate,
    blame_data,
    checked,
    keep_generators,
    seed_generators,
)
from mpframe.data.loading import Loader, batch_or_raise, data_loader, require_shared
from mpframe.data.samples import hash_key
from mpframe.data.shares import Place, Reading, Shares, comes_from, is_one_shot
from mpframe.data.workers import CurrentSamples, WorkerPool

_LOOKED_AT = 2**16  # bytes of each tensor of a batch, by which it is known again
_WAY_OUT = "or take only the weights into a new run with init_from"


class _Saved(NamedTuple):
    """A place in a stream that was reached."""

    batches: int = 0
    reader: Any = None
    digest: int = 0  # of the last batch


class StreamLoader(Loader, Callback):
    """Batches of a stream, which is also a callback of its run so that checkpoints keep its place.

    Args:
        stream: an IterableDataset or another object to iterate over, of samples, or a DataLoader,
            of batches for this rank.
        batch_size: samples per batch of all ranks together, >= 1.
        batches_per_epoch: how many batches an epoch has. None: as many as the stream's `__len__`
            makes.
        endless: whether the stream begins again when it ends. If False, an epoch is one pass, whose
            last batch may be smaller.

    All others are as `Loader` has them. ConfigError, DataError: an argument cannot be used.
    """

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        *,
        batches_per_epoch: int | None = None,
        endless: bool = True,
        seed: int = 0,
        workers: int = 0,
        worker_timeout: float | None = None,
        collate: Collate | None = None,
        pin: bool = False,
        comm: Comm = SINGLE_PROCESS,
        split: str = "training",
        option: str = "dataset.batch_size",
    ) -> None:
        require_shared(option, batch_size, workers, comm)
        self.batch_size, self.waited, self.size = batch_size, 0.0, 0
        self._comm, self._split, self._endless = comm, split, endless
        share = batch_size // comm.size
        facts = Reading(share, seed, comm.rank, comm.size, max(workers, 1), split, collate, endless)
        if comes_from("streaming", stream) and not isinstance(stream, DataLoader):
            stream, workers, collate = _of_mosaic(stream, share, workers, collate), 0, None
        self._stream = stream
        self._reader: _Workers | _Batches
        if isinstance(stream, DataLoader):
            _refuse_beside_batches(stream, share, workers, collate, option, batch_size)
            self._reader = _Batches(stream, facts)
        else:
            self._reader = _Workers(stream, facts, workers, worker_timeout, pin)
        self._length = self._count(batches_per_epoch) if endless else 0
        self._start = _Saved()  # where reading began: at the beginning, or at a checkpoint's place
        self._last: _Saved | None = None  # None: reading has not begun

    def __len__(self) -> int:
        """Count the batches of an epoch: 0 if it is one pass over a stream of unknown length."""
        return self._length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return this rank's part of the batches of `epoch`, from number `start` on.

        Batches that were read before are read again from the beginning, or from the checkpoint's
        place. DataError: a sample cannot be read or holds NaN or inf, or the stream has changed.
        """
        if not self._endless:
            return self._pass()
        return self._go_on(epoch * len(self) + start, len(self) - start)

    def batch_ids(self, epoch: int, batch: int) -> Tensor:
        """Return numbers [N] int64 for this rank's samples of a batch, counted from the start."""
        first = (epoch * len(self) + batch) * self.batch_size
        return self._comm.part(torch.arange(first, first + self.batch_size))

    def close(self) -> None:
        """End the workers."""
        self._reader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last batch that was used, with every rank's on rank 0."""
        last = self._last or self._start
        moved = last.batches != self._start.batches
        reader = self._reader.place() if moved else self._start.reader
        ranks = self._comm.gather_object([reader, last.digest])
        return {"batches": last.batches, "made_by": self._facts(), "ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place. CheckpointError if the stream is read otherwise, or only once."""
        self.require_resumable("resume")
        for option, now in self._facts().items():
            then = state["made_by"][option]
            if then != now:
                raise CheckpointError(
                    f"{option}={now}: the stream was read with {then}; use that, {_WAY_OUT}"
                )
        self._start = _Saved(int(state["batches"]), *state["ranks"][self._comm.rank])
        self._last = None

    def require_resumable(self, option: str) -> None:
        """Refuse a stream in which nothing can go back. CheckpointError names the option."""
        if is_one_shot(self._stream):
            raise CheckpointError(
                f"{option}: {type(self._stream).__name__} can be read only once, so its run cannot "
                f"be continued exactly; use resume=none, {_WAY_OUT}"
            )

    def _facts(self) -> dict[str, int]:
        return {
            "dataset.batch_size": self.batch_size,
            "batches_per_epoch": self._length,
            "dataset.workers": self._reader.workers,
            "ranks": self._comm.size,
        }

    def _count(self, stated: int | None) -> int:
        """Return the batches of an epoch."""
        if stated is not None:
            require_whole("dataset: batches_per_epoch of its Task", stated, least=1)
            return stated
        name = type(self._stream).__name__
        size = 0
        if hasattr(type(self._stream), "__len__"):
            try:
                size = len(self._stream)
            except TypeError:
                size = 0  # As a DataLoader's, of a stream without a length.
        size //= 1 if isinstance(self._reader, _Batches) else self.batch_size
        if size:
            return size
        raise DataError(
            f"dataset: {name} does not say how many batches of {self.batch_size} it has; give its "
            "Task batches_per_epoch=N, after which it is validated"
        )

    def _go_on(self, position: int, count: int) -> Iterator[Any]:
        asked = perf_counter()
        self._seek(position)
        for _ in range(count):
            batch = self._next()
            self.waited += perf_counter() - asked
            yield batch
            asked = perf_counter()

    def _seek(self, position: int) -> None:
        """Make `position` the number of the next batch."""
        if self._last is None or self._last.batches != position:
            self._begin(self._start if self._start.batches <= position else _Saved())
        while self._last is not None and self._last.batches < position:
            self._next()

    def _begin(self, saved: _Saved) -> None:
        again = self._reader.begin(saved.batches, saved.reader)
        self._last = saved
        if again:
            batch = self._reader.next_batch()
            if _digest(batch) != saved.digest:
                raise DataError(
                    f"dataset: {type(self._stream).__name__} does not give the batch again that "
                    "the run used last, so it cannot be continued exactly; give it the data and "
                    f"seeds it had, {_WAY_OUT}"
                )

    def _next(self) -> Any:
        assert self._last is not None
        batch = self._reader.next_batch()
        if batch is None:
            raise DataError(
                f"dataset: {type(self._stream).__name__} ended and gave no more samples"
            )
        self._last = _Saved(self._last.batches + 1, None, _digest(batch))
        return batch

    def _pass(self) -> Iterator[Any]:
        """Yield the batches of one pass, None from a rank that has no more while others have."""
        self._reader.begin(0, None)
        self.size, more = 0, True
        while more:
            batch = self._reader.next_batch()
            more = self._comm.any(batch is not None)
            if more:
                self.size += _rows(batch)
                yield batch


class _Workers:
    """Reads samples, in this process or in workers, which take turns."""

    def __init__(
        self, stream: Any, reading: Reading, workers: int, timeout: float | None, pin: bool
    ) -> None:
        self._stream, self._reading, self.workers = stream, reading, workers
        self._timeout, self._pin = timeout, pin
        self._batches: DataLoader[Any] | None = None
        self._began: Any = None

    def begin(self, batches: int, places: Any) -> bool:
        """Begin after `batches` batches, with the last one again. Return whether there is one."""
        first = max(batches - 1, 0)
        if self._batches is None or self._began != (first, places):
            self._make(first, places)
        assert self._batches is not None
        self._number = first
        self._places = _places_of(places, self._reading.workers)
        self._answers = self._pool.start(self._batches)
        for _ in range(first % self._reading.workers):
            self._answer()
        return batches > 0

    def next_batch(self) -> Any:
        """Return the next batch, or None at the end."""
        answer = self._answer()
        if answer is None:
            return None
        batch, place = answer
        worker = self._number % self._reading.workers
        self._before, self._places[worker] = self._places[worker], place
        self._number += 1
        return batch

    def place(self) -> list[Any]:
        """Return where each worker goes on, the last one with its last batch again."""
        places = list(self._places)
        places[(self._number - 1) % self._reading.workers] = self._before
        return [tuple(place) for place in places]

    def close(self) -> None:
        if self._batches is not None:
            self._pool.close()

    def _answer(self) -> Any:
        try:
            return batch_or_raise(self._pool.next_batch(self._answers, self))
        except StopIteration:
            return None

    def locate(self, index: int | None) -> str:
        """Say where in the stream a worker is."""
        what = "no sample" if index is None else f"{self._reading.split} sample {index}"
        return f"{what} (of its pass, near batch {self._number})"

    def _make(self, first: int, places: Any) -> None:
        self.close()
        current = CurrentSamples(self.workers)
        self._pool = WorkerPool(current, self._timeout)
        begin = _places_of(places, self._reading.workers)
        self._began = first, places
        shares = Shares(self._stream, self._reading, first, begin, current)
        self._batches = data_loader(shares, self.workers, self._pin, batch_size=None)


class _Batches:
    """Reads batches that a user's DataLoader makes, with the workers it has.

    Its random numbers depend on seed, rank, pass and batch, so that it may shuffle.
    """

    workers = 0

    def __init__(self, loader: Any, reading: Reading) -> None:
        self._loader, self._reading = loader, reading
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def begin(self, batches: int, place: Any) -> bool:
        """Begin after `batches` batches. Return whether the last one comes again."""
        number, read, state = place or (0, 0, None)
        if state is not None:
            self._loader.load_state_dict(state)
        self._open(number)
        if state is not None:
            self._read = read
            return False
        while self._read < read - 1:
            self._next()
        return batches > 0

    def next_batch(self) -> Any:
        """Return the next batch, or None at the end."""
        batch = self._next()
        if batch is None and self._reading.endless:
            self._open(self._pass + 1)
            batch = self._next()
        if batch is None:
            return None
        first = (self._read - 1) * self._reading.batch_size
        indices = range(first, first + _rows(batch))
        place = self._pass, self._read - 1
        return checked(batch, indices, self._reading.split, place, ())

    def place(self) -> list[Any]:
        """Return the pass, the batches read of it, and the loader's state if it has one."""
        return [self._pass, self._read, self._loader.state_dict() if self._stateful else None]

    def close(self) -> None:
        """Let its workers go."""
        self._iterator = None

    def _open(self, number: int) -> None:
        self._iterator: Any = None
        self._pass, self._read = number, 0

    def _next(self) -> Any:
        what = f"batch {self._read} of {type(self._loader).__name__} (pass {self._pass})"
        key = hash_key(self._reading.seed, self._pass, self._read, self._reading.rank)
        with keep_generators(), blame_data(f"{what} cannot be read"):
            seed_generators(int(key[0]))
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator, None)
        self._read += batch is not None
        return tuple(batch) if type(batch) is list else batch  # torch's list of a tuple's parts


def _of_mosaic(stream: Any, share: int, workers: int, collate: Collate | None) -> Any:
    """Return the loader by which Mosaic's dataset keeps its place."""
    from streaming import StreamingDataLoader

    return StreamingDataLoader(
        stream, batch_size=share, num_workers=workers, collate_fn=collate, drop_last=True
    )


def _refuse_beside_batches(
    loader: Any, share: int, workers: int, collate: Collate | None, option: str, batch_size: int
) -> None:
    """Refuse options that a DataLoader was made without."""
    name, made = type(loader).__name__, getattr(loader, "batch_size", None)
    if made is not None and made != share:
        raise ConfigError(
            f"{option}={batch_size}: {name} makes batches of {made} for each rank; use "
            f"{option}={made * (batch_size // share)}"
        )
    if workers:
        raise ConfigError(
            f"dataset.workers={workers}: {name} has its own; use dataset.workers=0 and "
            f"{name}(..., num_workers={workers})"
        )
    if collate is not None:
        raise DataError(
            f"dataset: {name} makes batches itself, and its Task has a collate; give it to {name} "
            "as collate_fn"
        )


def _rows(batch: Any) -> int:
    """Count the samples of a batch by its first tensor."""
    first = next(tensors_in(batch), None)
    return 0 if first is None else len(first) if first.dim() else 1


def _digest(batch: Any) -> int:
    """Return a checksum of the beginning of each tensor."""
    digest = 0
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided and not tensor.is_nested:
            flat = tensor.detach().reshape(-1)[: _LOOKED_AT // tensor.element_size()]
            digest = zlib.crc32(flat.contiguous().view(torch.uint8).numpy().tobytes(), digest)
    return digest


def _places_of(places: Any, workers: int) -> list[Place]:
    return [Place()] * workers if places is None else [Place(*place) for place in places]
