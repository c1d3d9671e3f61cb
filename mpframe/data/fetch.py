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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from mpframe.data.keyed_random import keyed_state
from mpframe.data.task import Batch
from mpframe.errors import DataError, MpframeError


class Fetcher(Dataset[Any]):
    """Answers requests for batches of `dataset`.

    Args:
        dataset: map-style; `set_epoch` and `fetch_batch` are used where it has them.
        seed: the run's seed.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch: int | None = None
        self._view: Any = dataset

    def __getitems__(self, request: list[int]) -> Batch | MpframeError:
        """The batch, or the error that prevented it.

        An error raised in a worker would come out wrapped in that worker's traceback; returned,
        it can be raised where the batch was asked for, still one line.
        """
        epoch, *indices = request
        if epoch != self._epoch:
            self._view, self._epoch = at_epoch(self._dataset, self._seed, epoch), epoch
        try:
            if hasattr(self._view, "fetch_batch"):
                return _as_pair(self._view.fetch_batch(indices))
            return _stack(_samples(self._view, indices, (self._seed, epoch)), indices)
        except MpframeError as error:
            return error


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


def _samples(dataset: Any, indices: Sequence[int], key: tuple[int, int]) -> list[Any]:
    states = keyed_state(*key, indices).tolist()
    samples = []
    with _generators_put_back():
        for index, state in zip(indices, states, strict=True):
            torch.default_generator.manual_seed(state)
            random.seed(state)
            np.random.seed(state % 2**32)
            samples.append(dataset[index])
    return samples


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
        return _as_pair(default_collate(samples))
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"dataset: samples {indices[0]} to {indices[-1]} do not stack into one batch "
            f"({reason}); make every sample a tensor, an array or a number of one shape"
        ) from error


def _as_pair(batch: Any) -> Batch:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return inputs, targets
    kind = type(batch).__name__
    raise DataError(
        f"dataset: a sample must be an (input, target) pair of tensors, arrays or numbers, "
        f"but its batch is a {kind}; return such a pair from __getitem__"
    )
