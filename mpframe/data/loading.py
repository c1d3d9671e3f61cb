"""Batches in an order that depends only on (seed, epoch), from any batch on.

A run that stops in the middle of an epoch goes on with `loader.epoch(epoch, start)` and sees
exactly the batches it would have seen. The order is a permutation computed from its key, and so are
all random numbers, such as those that augment a sample: pure functions of (seed, epoch, sample).
`Fetcher` makes a batch of indices, in the main process or in a worker. The batch is found to be
finite on the host, before the model sees it.
"""

import copy
import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, DataError, MpframeError, first_line
from mpframe.core.ranges import require_whole
from mpframe.core.tree import map_tensors, named_tensors, tensors_in
from mpframe.core.user_code import UserCode, described, name_of, raised
from mpframe.data.workers import (
    POLL_SECONDS,
    CurrentSamples,
    EpochOrder,
    WorkerPool,
    ignore_signals,
)


def require_finite(
    batch: Any,
    indices: Sequence[int],
    split: str,
    place: tuple[int, int],
    samples: Sequence[Any] = (),
) -> None:
    """Refuse a batch on the host that holds NaN or inf: name the tensor and, if known, its sample.

    `place` is (epoch, the batch's number in it); `samples` is what the batch was made of, in the
    order of `indices`, or empty.
    """
    bad = _first_bad(batch)
    if bad is None:
        return
    whose, name = _in_samples(samples, indices) or (_by_row(bad[1], indices), bad[0])
    where = f" in its {name}" if name else ""
    raise DataError(
        f"dataset: {split} {whose} holds NaN or inf{where} (epoch {place[0]}, batch {place[1]}); "
        "every value must be finite: fix or remove the sample"
    )


def several(indices: Sequence[int]) -> str:
    """Name the samples of a batch."""
    if list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return f"samples {indices[0]} to {indices[-1]}"
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"samples {', '.join(map(str, indices[:3]))}{more}"


def named_leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path; of a pair they are `inputs` and `targets`."""
    if type(batch) is tuple and len(batch) == 2:
        return chain(named_tensors(batch[0], "inputs"), named_tensors(batch[1], "targets"))
    return named_tensors(batch)


def _first_bad(node: Any) -> tuple[str, Tensor] | None:
    return next(((name, t) for name, t in named_leaves(node) if not _is_finite(t)), None)


def _in_samples(samples: Sequence[Any], indices: Sequence[int]) -> tuple[str, str] | None:
    """Return the bad sample and its tensor, seen before they were put together."""
    for index, sample in sorted(zip(indices, samples, strict=False), key=lambda pair: pair[0]):
        bad = _first_bad(sample)
        if bad is not None:
            return f"sample {index}", bad[0]
    return None


def _by_row(tensor: Tensor, indices: Sequence[int]) -> str:
    """Name the bad sample, if the tensor has a row for each."""
    if tensor.shape[:1] != (len(indices),) or tensor.layout is not torch.strided:
        return f"one of {several(indices)}"
    rows = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
    return f"sample {min(index for index, bad in zip(indices, rows, strict=True) if bad)}"


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor
    if tensor.layout is not torch.strided:
        values = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    # If a value is NaN, both ends are. One pass for them is far cheaper than isfinite's mask.
    low, high = values.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


UInt64Array: TypeAlias = NDArray[np.uint64]
Word: TypeAlias = int | Sequence[int] | NDArray[np.integer]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def keyed_state(*words: Word) -> UInt64Array:
    """Fold words into 64-bit states, one for each element of the longest word.

    Words are integers of any sign (modulo 2^64) or 1-d integer sequences of one length.
    """
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mix64(state + _as_uint64(word) + _GAMMA)
    return state


def keyed_uniform(draws: int, *words: Word) -> NDArray[np.float64]:
    """Return `draws` uniforms in [0, 1) of 53 random bits for each key, [keys, draws]."""
    steps = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    bits = _mix64(keyed_state(*words)[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def _as_uint64(word: Word) -> UInt64Array:
    # At least 1-d: numpy wraps arrays silently, as modulo 2^64 wants, but warns for scalars.
    if isinstance(word, int):
        return np.array([word % 2**64], dtype=np.uint64)
    return np.asarray(word, dtype=np.int64).astype(np.uint64)


Collate = Callable[[list[Any]], Any]


class Fetcher(Dataset[Any]):
    """Answers requests for batches of a map-style dataset, by its `fetch_batch` if it has one.

    `current` is where a worker writes which sample it is reading.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        current: CurrentSamples,
        split: str,
        collate: Collate | None,
    ) -> None:
        self._dataset = _by_batch(dataset, collate)
        self._seed, self._current, self._split, self._collate = seed, current, split, collate
        self._epoch: int | None = None
        self._view: Any = self._dataset

    def __getitems__(self, request: list[int]) -> Any:
        """Return the batch, or the MpframeError that prevented it; None if no sample is asked for.

        Raised in a worker, an error would come out wrapped in that worker's traceback.
        """
        epoch, number, *indices = request
        if not indices:
            return None
        try:
            answer = self._fetch(epoch, number, indices)
        except MpframeError as error:
            answer = error
        self._current.note()  # Not if the worker is ending: then its sample is to be reported.
        return answer

    def _fetch(self, epoch: int, number: int, indices: list[int]) -> Any:
        if epoch != self._epoch:
            with _blamed_on(f"epoch {epoch} cannot be read"):
                self._view, self._epoch = at_epoch(self._dataset, self._seed, epoch), epoch
        if hasattr(self._view, "fetch_batch"):
            samples: list[Any] = []
            self._current.note(indices[0])
            with _blamed_on(f"{several(indices)} cannot be read"):
                batch = self._view.fetch_batch(indices)
        else:
            with _generators_restored():
                samples = self._samples(indices, epoch)
                batch = self._collated(samples, indices)
        if next(tensors_in(batch), None) is None:
            raise DataError(
                f"dataset: {several(indices)} make {described(batch)}, which holds no tensor; "
                "return tensors, arrays or numbers, alone or in tuples, lists and dicts"
            )
        require_finite(batch, indices, self._split, (epoch, number), samples)
        return _without_graph(batch)

    def _samples(self, indices: Sequence[int], epoch: int) -> list[Any]:
        states = keyed_state(self._seed, epoch, indices).tolist()
        samples = []
        for index, state in zip(indices, states, strict=True):
            self._current.note(index)
            torch.default_generator.manual_seed(state)
            random.seed(state)
            np.random.seed(state % 2**32)
            with _blamed_on(f"sample {index} cannot be read"):
                samples.append(self._view[index])
        return samples

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> Any:
        if self._collate is None:
            return _stacked(samples, indices)
        with _blamed_on(f"{several(indices)} cannot be collated", "fix the collate of its Task"):
            return self._collate(samples)


class TensorRows:
    """Rows of tensors of one length, fetched a batch at a time, as if collated."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return rows `indices` of each."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return tuple(tensor[chosen] for tensor in self._tensors)


def _by_batch(dataset: Any, collate: Collate | None) -> Any:
    """Return `dataset`, or the rows of torch's TensorDataset, which draws no random numbers."""
    if type(dataset) is not TensorDataset or collate is not None:
        return dataset
    strided = all(tensor.layout is torch.strided for tensor in dataset.tensors)
    return TensorRows(dataset.tensors) if strided else dataset


def at_epoch(dataset: Any, seed: int, epoch: int) -> Any:
    """Return a shallow copy of `dataset` as it is in `epoch`, by `set_epoch` if it has that method.

    Two loaders may share a dataset. torch's Subset and ConcatDataset are unwrapped.
    """
    if not isinstance(dataset, Subset | ConcatDataset) and not hasattr(dataset, "set_epoch"):
        return dataset
    view = copy.copy(dataset)
    if isinstance(view, Subset):
        view.dataset = at_epoch(view.dataset, seed, epoch)
    elif isinstance(view, ConcatDataset):
        view.datasets = [at_epoch(part, seed, epoch) for part in view.datasets]
    else:
        view.set_epoch(seed, epoch)
    return view


@contextmanager
def _blamed_on(what: str, way_out: str = "fix the dataset or its data") -> Iterator[None]:
    """Make one line of an error of the dataset's code, with the traceback as a note.

    The error may come from a worker, and its cause cannot.
    """
    try:
        yield
    except MpframeError:
        raise
    except (Exception, SystemExit) as error:
        blamed = DataError(f"dataset: {what}: {raised(error)}; {way_out}")
        blamed.add_note(traceback.format_exc())
        raise blamed from None


@contextmanager
def _generators_restored() -> Iterator[None]:
    # Only torch's CPU generator: torch.manual_seed would reset the accelerators' as well.
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _stacked(samples: list[Any], indices: Sequence[int]) -> Any:
    try:
        batch = default_collate(samples)
    except Exception as error:  # The samples are whatever the dataset gave.
        raise DataError(
            f"dataset: {several(indices)} do not stack into one batch "
            f"({first_line(error)}); give every sample the same shapes, or give its Task a collate "
            "that makes a batch of a list of samples"
        ) from error
    return tuple(batch) if type(batch) is list else batch  # torch's list of a tuple's parts


def _without_graph(batch: Any) -> Any:
    """Return the tensors without their graph: it cannot leave a worker, and trains nothing."""
    if not any(tensor.grad_fn for tensor in tensors_in(batch)):
        return batch
    return map_tensors(
        lambda t: t.detach().requires_grad_(t.requires_grad) if t.grad_fn else t, batch
    )


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
        comm: the ranks that share each batch; each reads its own part of it.
        split, option: what the samples are for, and the path of the batch size, for messages.

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
        require_whole(option, batch_size, least=1)
        require_whole("dataset.workers", workers, least=0)
        if drop_last and self.size < batch_size:
            raise ConfigError(
                f"{option}={batch_size}: the training set has {self.size} samples; "
                f"use {self.size} or fewer"
            )
        if rest := batch_size % comm.size:
            raise ConfigError(
                f"{option}={batch_size}: {comm.size} ranks share each batch; use a multiple of "
                f"{comm.size}, as {batch_size - rest + comm.size}"
            )
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.drop_last, self.waited = drop_last, 0.0
        self._option, self._comm, self._split = option, comm, split
        self._order: tuple[int, Tensor] | None = None
        self._plan = _Plan()
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
        """Count the batches of an epoch."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return this rank's part of the batches of `epoch`, from number `start` (0 to len) on.

        A part is None if a short last batch leaves this rank without samples. A loader reads one
        epoch at a time: asking for another ends the one before. While reading, DataError says that
        a sample cannot be read or holds NaN or inf, or that samples make no batch.
        """
        if not 0 <= start <= len(self):
            raise DataError(
                f"{self._option}={self.batch_size}: an epoch has {len(self)} batches and cannot "
                f"start at batch {start}; use the batch size and the data the run began with"
            )
        return self._read(epoch, start)

    def batch_ids(self, epoch: int, batch: int) -> Tensor:
        """Return the indices [N] int64 of the samples in this rank's part of a batch, in order."""
        first = batch * self.batch_size
        return self._comm.part(self._order_of(epoch)[first : first + self.batch_size])

    def close(self) -> None:
        """End the workers. Nothing is read afterwards."""
        self._pool.close()

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        numbers = range(start, len(self))
        order = EpochOrder(self._split, epoch, self._order_of(epoch), self.batch_size)
        requests = _requests(order, numbers, self._comm)
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
    """Return the order of an epoch of `size` samples: [size] int64, from seed and epoch only."""
    key = int(keyed_state(seed, epoch)[0])
    return torch.randperm(size, generator=torch.Generator().manual_seed(key))


class _Plan:
    """The requests of the epoch being read: a DataLoader keeps one sampler for ever."""

    def __init__(self) -> None:
        self.requests: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.requests


def _requests(order: EpochOrder, numbers: range, comm: Comm) -> Iterator[list[int]]:
    # This is no method: a generator that holds the loader would make a reference cycle, and the
    # loader's workers would live until the garbage collector runs, perhaps in a new worker.
    size = order.batch_size
    for number in numbers:
        indices = comm.part(order.indices[number * size : (number + 1) * size])
        yield [order.epoch, number, *indices.tolist()]


def _batch_or_raise(answer: Any) -> Any:
    if isinstance(answer, MpframeError):
        try:
            raise answer
        finally:
            del answer  # It would be such a cycle as well: error, traceback, this frame.
    return answer


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
