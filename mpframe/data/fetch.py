"""From indices to a batch, wherever it runs: in the main process or in a worker.

A batch is any tree of tensors: a tensor, tuples, lists, dicts, with numbers and strings among
them. A request for one is a list of integers: the epoch, the batch's number in it, and the samples'
indices. The epoch comes with the indices, so a worker can live for many epochs and never uses an
old one.

Where random numbers are drawn, they depend on (seed, epoch, index) alone:

- a dataset with `fetch_batch(indices)` makes whole batches and draws its own numbers from what
  `set_epoch(seed, epoch)` told it;
- torch's own TensorDataset draws none, and its rows are fetched a batch at a time, too;
- any other is asked sample by sample, and the global generators of torch, numpy and random are
  set to the sample's key before each (a collate draws on from the last one's), and restored after
  the batch. Random transforms written against them are reproducible as they stand, and loading
  leaves the model's generator alone.
"""

import copy
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from mpframe.data.finite import require_finite, several
from mpframe.data.keyed_random import keyed_state
from mpframe.data.workers import CurrentSamples
from mpframe.errors import DataError, MpframeError, first_line
from mpframe.tree import map_tensors, tensors_in
from mpframe.user_code import described, raised

Collate = Callable[[list[Any]], Any]


class Fetcher(Dataset[Any]):
    """Answers requests for batches of `dataset`.

    Args:
        dataset: map-style; `set_epoch` and `fetch_batch` are used if it has them.
        seed: the run's seed.
        current: where a worker writes which sample it is reading.
        split: what the samples are for, in messages.
        collate: makes a batch of a list of samples; None: torch's default_collate.
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
        self._seed = seed
        self._current = current
        self._split = split
        self._collate = collate
        self._epoch: int | None = None
        self._view: Any = self._dataset

    def __getitems__(self, request: list[int]) -> Any:
        """The batch, or the MpframeError that prevented it; None if no sample is asked for.

        An error raised in a worker would come out wrapped in that worker's traceback; returned,
        it can be raised where the batch was asked for, still one line.
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
            batch = self._whole(indices)
        else:
            with _generators_restored():
                samples = self._samples(indices, epoch)
                batch = self._collated(samples, indices)
        if next(tensors_in(batch), None) is None:
            raise DataError(_without_tensor(batch, indices))
        require_finite(batch, indices, self._split, (epoch, number), samples)
        return _without_graph(batch)

    def _whole(self, indices: list[int]) -> Any:
        self._current.note(indices[0])
        with _blamed_on(f"{several(indices)} cannot be read"):
            return self._view.fetch_batch(indices)

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
        what = f"{several(indices)} cannot be collated"
        with _blamed_on(what, "fix the collate of its Task"):
            return self._collate(samples)


class TensorRows:
    """Rows of tensors, fetched a batch at a time: what collating the single rows gives.

    Args:
        tensors: of one length.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Rows `indices` of each."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return tuple(tensor[chosen] for tensor in self._tensors)


def _by_batch(dataset: Any, collate: Collate | None) -> Any:
    """`dataset`, or the rows of torch's own TensorDataset, which draws no random numbers."""
    if type(dataset) is not TensorDataset or collate is not None:
        return dataset
    strided = all(tensor.layout is torch.strided for tensor in dataset.tensors)
    return TensorRows(dataset.tensors) if strided else dataset


def at_epoch(dataset: Any, seed: int, epoch: int) -> Any:
    """`dataset` as it is in `epoch`: a shallow copy, told by `set_epoch` if it has that method.

    A copy, so that a dataset two loaders share is in the right epoch for each. torch's Subset and
    ConcatDataset are unwrapped.
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
    """Within the block an error of the dataset's own code becomes one line.

    The traceback goes with it as a note: the error may come from a worker, and its cause cannot.
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
        reason = first_line(error)
        raise DataError(
            f"dataset: {several(indices)} do not stack into one batch "
            f"({reason}); give every sample the same shapes, or give its Task a collate that "
            "makes a batch of a list of samples"
        ) from error
    return tuple(batch) if type(batch) is list else batch  # torch's list of a tuple's parts


def _without_tensor(batch: Any, indices: Sequence[int]) -> str:
    return (
        f"dataset: {several(indices)} make {described(batch)}, which holds no "
        "tensor; return tensors, arrays or numbers, alone or in tuples, lists and dicts"
    )


def _without_graph(batch: Any) -> Any:
    """The tensors without their graph: it cannot leave a worker, and nothing in it is trained."""
    if not any(tensor.grad_fn for tensor in tensors_in(batch)):
        return batch
    return map_tensors(_detached, batch)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.grad_fn else tensor
