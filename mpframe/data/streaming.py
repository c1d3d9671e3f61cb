"""Batches of a stream: samples that come one after the other, perhaps more than a run ever reads.

An epoch is a number of batches, and the next one goes on where the stream stood. A checkpoint keeps
the place after the batch that was used last, however far workers have read ahead. A resumed run
reads that batch again, to see that the stream is the same. shares.py has what each worker reads.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpframe.core.callback import Callback
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import CheckpointError, ConfigError, DataError
from mpframe.core.ranges import require_whole
from mpframe.core.tree import tensors_in
from mpframe.data.fetching import Collate
from mpframe.data.loading import Loader, batch_or_raise, data_loader, require_shared, share_of
from mpframe.data.shares import Place, Shares, comes_from, is_batched, is_one_shot
from mpframe.data.workers import CurrentSamples, WorkerPool

_LOOKED_AT = 2**16  # bytes of each tensor of a batch, by which it is known again
_WAY_OUT = "or take only the weights into a new run with init_from"


class _Reached(NamedTuple):
    batches: int = 0  # that were read
    digest: int = 0  # of the last one
    places: Any = None  # where each worker goes on, the last one with that batch again


class StreamLoader(Loader, Callback):
    """Batches of a stream, which is also a callback of its run so that checkpoints keep its place.

    Args:
        stream: an IterableDataset, or another iterable of samples, or a DataLoader, whose batches
            are this rank's.
        batch_size: samples per batch of all ranks together, >= 1.
        batches_per_epoch: how many batches make an epoch, >= 1. None: as many as the stream's
            `__len__` says.
        endless: begin the stream again when it ends. If False, an epoch is one pass over it, with
            an incomplete last batch.

    The others are as `Loader` has them. ConfigError, DataError: one of them cannot be used.
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
        self._comm, self._timeout, self._pin = comm, worker_timeout, pin
        part = len(share_of(torch.arange(batch_size), comm))
        if comes_from("streaming", stream) and not is_batched(stream):
            from streaming import StreamingDataLoader  # It keeps the place of Mosaic's dataset.

            stream = StreamingDataLoader(
                stream, batch_size=part, num_workers=workers, collate_fn=collate
            )
            workers, collate = 0, None
        if is_batched(stream):
            name, made = type(stream).__name__, stream.batch_size
            if workers or collate is not None or made not in (None, part):
                raise ConfigError(
                    f"{option}={batch_size}: {name} makes the batches of each rank itself, with "
                    f"batch_size={made} where {part} is wanted; leave dataset.workers and collate "
                    f"to {name}, or give its dataset"
                )
            if comm.tensor > 1:
                raise ConfigError(
                    f"distributed.tensor={comm.tensor}: {name} makes the batches of each rank, and "
                    "ranks that divide layers read the same ones; give the samples instead"
                )
        self._workers, ranks = workers, (comm.data_rank, comm.data_size)
        self._shares = Shares(
            *(stream, part, seed, *ranks, max(workers, 1), split, collate, endless),
            CurrentSamples(workers),
        )
        self._length = self._count(batches_per_epoch) if endless else 0
        self._pool: Any = None
        self._began = 0  # after how many batches the present pool of workers did
        self._start = _Reached()  # Where reading begins: at the beginning, or as a checkpoint says.
        self._now: _Reached | None = None  # None before it began

    def __len__(self) -> int:
        """Count the batches of an epoch, 0 for a single pass, whose length is not known."""
        return self._length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return this rank's part of the batches of `epoch`, from number `start` on.

        To go back, the stream is read again from its beginning, or from the checkpoint's place.
        DataError: a sample cannot be read or holds NaN or inf, or the stream has changed.
        """
        if not self._shares.endless:
            return self._read_once()
        return self._read_on(epoch * len(self) + start, len(self) - start)

    def batch_ids(self, epoch: int, batch: int) -> Tensor:
        """Return numbers [N] int64 for this rank's samples, counted from the run's first one."""
        first = (epoch * len(self) + batch) * self.batch_size
        return share_of(torch.arange(first, first + self.batch_size), self._comm)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch that was used, on rank 0 every rank's."""
        reached = self._now or self._start
        places = reached.places
        if places is None and reached.batches:
            places = [tuple(place) for place in self._places]
            places[(reached.batches - 1) % len(places)] = tuple(self._before)
        ranks = self._comm.gather_object([reached.digest, places])[:: self._comm.tensor]
        return {"batches": reached.batches, "made_with": self._facts(), "ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place. CheckpointError if the stream is read otherwise, or only once."""
        self.require_resumable("resume")
        made_with = {**state["made_with"], "ranks": len(state["ranks"])}
        for option, now in {**self._facts(), "ranks": self._comm.data_size}.items():
            if (then := made_with[option]) != now:
                again = f"start {then} processes" if option == "ranks" else f"use {option}={then}"
                raise CheckpointError(
                    f"{option}={now}: the stream was read with {then}; {again}, {_WAY_OUT}"
                )
        self.close()
        self._start = _Reached(int(state["batches"]), *state["ranks"][self._comm.data_rank])
        self._now = None

    def require_resumable(self, option: str) -> None:
        """Refuse a stream that can be read only once. ConfigError: it names the option."""
        if is_one_shot(self._shares.stream):
            raise ConfigError(
                f"{option}: {type(self._shares.stream).__name__} can be read only once, so the run "
                f"cannot be continued exactly; use resume=none, {_WAY_OUT}"
            )

    def _locate_in_stream(self, index: int | None) -> str:
        """Say where in the stream a worker is."""
        what = "no sample" if index is None else f"{self._shares.split} sample {index}"
        return f"{what} (of its pass over the stream, near batch {self._number})"

    def _facts(self) -> dict[str, int]:
        return {
            "dataset.batch_size": self.batch_size,
            "dataset.batches_per_epoch": self._length,
            "dataset.workers": self._workers,
        }

    def _count(self, stated: int | None) -> int:
        """Return the batches of an epoch."""
        if stated is not None:
            require_whole("dataset.batches_per_epoch", stated, least=1)
            return stated
        stream = self._shares.stream
        try:
            size = len(stream) // (1 if is_batched(stream) else self.batch_size)
        except TypeError:
            size = 0
        if not size:
            raise DataError(
                f"dataset: {type(stream).__name__} does not have the length of an epoch; give its "
                "Task batches_per_epoch=N, after which validation is due"
            )
        return size

    def _read_on(self, position: int, count: int) -> Iterator[Any]:
        asked = perf_counter()
        if self._now is None or self._now.batches != position:
            begin = self._start if self._start.batches <= position else _Reached()
            self._begin(begin)
            for _ in range(position - begin.batches):
                self._next()
        for _ in range(count):
            batch = self._next()
            self.waited += perf_counter() - asked
            yield batch
            asked = perf_counter()

    def _read_once(self) -> Iterator[Any]:
        """Yield the batches of a pass, None if only other ranks have more."""
        self._begin(_Reached())
        self.size = 0
        while self._comm.any((batch := self._answer()) is not None):
            first = next(tensors_in(batch), None)
            self.size += 0 if first is None else len(first)
            yield batch

    def _begin(self, reached: _Reached) -> None:
        """Go on from a place, after reading its last batch again."""
        self._number = max(reached.batches - 1, 0)
        self._places = [Place(*place) for place in reached.places or [()] * self._shares.workers]
        if self._pool is None or self._began != reached.batches:
            self.close()
            self._began = reached.batches
            places = tuple(self._places)
            self._shares = replace(self._shares, first=self._number, places=places)
            self._pool = WorkerPool(self._shares.current, self._timeout)
            self._batches = data_loader(self._shares, self._workers, self._pin, batch_size=None)
        self._answers = self._pool.start(self._batches)
        for _ in range(self._number % self._shares.workers):
            self._pool.next_batch(self._answers, self._locate_in_stream)
        if reached.batches and _digest(self._answer()) != reached.digest:
            raise DataError(
                f"dataset: {type(self._shares.stream).__name__} does not give the batch again that "
                "the run used last, so it cannot be continued exactly; give it the same data and "
                f"seeds, {_WAY_OUT}"
            )
        self._now = reached

    def _next(self) -> Any:
        batch = self._answer()
        if batch is None:
            raise DataError(f"dataset: {type(self._shares.stream).__name__} has no more samples")
        self._now = _Reached(self._number, _digest(batch))
        return batch

    def _answer(self) -> Any:
        """Return the next batch, or None at the end."""
        try:
            answer = batch_or_raise(self._pool.next_batch(self._answers, self._locate_in_stream))
        except StopIteration:
            return None
        worker = self._number % self._shares.workers
        batch, place = answer
        self._before, self._places[worker] = self._places[worker], place
        self._number += 1
        return batch


def _digest(batch: Any) -> int:
    """Return a checksum of the beginning of each tensor."""
    digest = 0
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided and not tensor.is_nested:
            flat = tensor.detach().reshape(-1)[: _LOOKED_AT // tensor.element_size()]
            digest = zlib.crc32(flat.contiguous().view(torch.uint8).numpy().tobytes(), digest)
    return digest
