"""From indices to a batch, wherever it runs: in the main process or in a worker.

A request is a list of integers, the epoch first and the samples' indices after it. The epoch
travels with the indices, so workers live on from epoch to epoch and none can hold a stale one.

Randomness has two homes, and both depend on (seed, epoch, index) alone:

- a dataset with `fetch_batch(indices) -> (inputs, targets)` makes whole batches and draws its own
  numbers from what `set_epoch(seed, epoch)` told it;
- any other is asked sample by sample, and the global generators of torch, numpy and random are
  set to the sample's key before each and put back after the batch. Random transforms written
  against them are reproducible as they stand, and loading leaves the model's generator alone.
"""

import copy
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from mpframe.data.keyed_random import keyed_state
from mpframe.data.task import Batch
from mpframe.data.workers import Slots
from mpframe.errors import DataError, MpframeError
from mpframe.user_code import described, first_line, raised


class Fetcher(Dataset[Any]):
    """Answers requests for batches of `dataset`.

    Args:
        dataset: map-style; `set_epoch` and `fetch_batch` are used where it has them.
        seed: the run's seed.
        slots: where a worker says which sample it is reading.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, slots: Slots) -> None:
        self._dataset = dataset
        self._seed = seed
        self._slots = slots
        self._epoch: int | None = None
        self._view: Any = dataset

    def __getitems__(self, request: list[int]) -> Batch | MpframeError:
        """The batch, or the error that prevented it.

        An error raised in a worker would come out wrapped in that worker's traceback; returned,
        it can be raised where the batch was asked for, still one line.
        """
        epoch, *indices = request
        try:
            answer: Batch | MpframeError = self._fetch(epoch, indices)
        except MpframeError as error:
            answer = error
        self._slots.note()  # Not where the worker is ending: what it was reading is to be told.
        return answer

    def _fetch(self, epoch: int, indices: list[int]) -> Batch:
        if epoch != self._epoch:
            with _blamed_on(f"epoch {epoch}"):
                self._view, self._epoch = at_epoch(self._dataset, self._seed, epoch), epoch
        if not hasattr(self._view, "fetch_batch"):
            return _stack(self._samples(indices, epoch), indices)
        self._slots.note(indices[0])
        with _blamed_on(f"samples {indices[0]} to {indices[-1]}"):
            batch = self._view.fetch_batch(indices)
        return _as_pair(batch, len(indices))

    def _samples(self, indices: Sequence[int], epoch: int) -> list[Any]:
        states = keyed_state(self._seed, epoch, indices).tolist()
        samples = []
        with _generators_put_back():
            for index, state in zip(indices, states, strict=True):
                self._slots.note(index)
                torch.default_generator.manual_seed(state)
                random.seed(state)
                np.random.seed(state % 2**32)
                with _blamed_on(f"sample {index}"):
                    samples.append(self._view[index])
        return samples


def at_epoch(dataset: Any, seed: int, epoch: int) -> Any:
    """`dataset` as it is in `epoch`: a shallow copy, told by `set_epoch` where it has that.

    A copy, so that a dataset two loaders share is in the right epoch for each. torch's Subset and
    ConcatDataset are looked through.
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
def _blamed_on(what: str) -> Iterator[None]:
    """Whatever the dataset's own code raises becomes one line; the traceback goes along as a note.

    A note, for the error may have to travel from a worker, and its cause cannot.
    """
    try:
        yield
    except MpframeError:
        raise
    except (Exception, SystemExit) as error:
        blamed = DataError(
            f"dataset: {what} cannot be read: {raised(error)}; mend the dataset or its data"
        )
        blamed.add_note(traceback.format_exc())
        raise blamed from None


@contextmanager
def _generators_put_back() -> Iterator[None]:
    # Only torch's CPU generator: torch.manual_seed would reset the accelerators' as well.
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _stack(samples: list[Any], indices: Sequence[int]) -> Batch:
    try:
        batch = default_collate(samples)
    except Exception as error:  # The samples are whatever the dataset gave.
        reason = first_line(error)
        raise DataError(
            f"dataset: samples {indices[0]} to {indices[-1]} do not stack into one batch "
            f"({reason}); make every sample a tensor, an array or a number of one shape"
        ) from error
    return _as_pair(batch, len(samples))


def _as_pair(batch: Any, count: int) -> Batch:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        if all(isinstance(part, Tensor) and part.shape[:1] == (count,) for part in batch):
            return _without_graph(inputs), _without_graph(targets)
    raise DataError(
        "dataset: a sample must be an (input, target) pair of tensors, arrays or numbers, but "
        f"{count} of them make {described(batch)}; return such a pair from __getitem__, or from "
        f"fetch_batch two tensors of {count} rows"
    )


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor alone: what it was computed from cannot leave a worker, and is not trained."""
    return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.grad_fn else tensor
