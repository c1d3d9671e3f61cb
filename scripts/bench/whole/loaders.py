"""Batches for the other trainers: mpframe's loader's, in its order, without its checks.

Both hold all samples ready as tensors, normalised once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from bench.whole.workloads import Workload
from mpframe.data.loading import shuffle_indices

SEED = 0


def dataloaders(work: Workload) -> tuple[Any, Any]:
    """Training and validation by torch's DataLoader, as its manual has it."""
    task = work.data()
    train, val = TensorDataset(*_samples(task.train)), TensorDataset(*_samples(task.val))
    order = Order(len(train), work)
    return (
        DataLoader(train, work.batch_size, sampler=order, drop_last=True),
        DataLoader(val, work.batch_size),
    )


def cut(work: Workload) -> tuple[Any, Any]:
    """The same cut out of the tensors a batch at a time: the least that loading can take."""
    task = work.data()
    train, val = _samples(task.train), _samples(task.val)
    order = Order(len(train[0]), work)
    parts = [torch.split(samples, work.batch_size) for samples in val]
    return _Cut(train, work.batch_size, order), list(zip(*parts, strict=True))


class Order(Sampler[int]):
    """The samples of mpframe's next epoch in whole batches, up to the last step."""

    def __init__(self, size: int, work: Workload) -> None:
        whole = size // work.batch_size
        steps = whole if work.max_steps is None else min(whole, work.max_steps)
        self._size, self._used, self._epoch = size, steps * work.batch_size, 0

    def __len__(self) -> int:
        return self._used

    def __iter__(self) -> Iterator[int]:
        return iter(self.next_epoch().tolist())

    def next_epoch(self) -> Tensor:
        """[len(self)] int64."""
        order = shuffle_indices(self._size, SEED, self._epoch)[: self._used]
        self._epoch += 1
        return order


class _Cut:
    def __init__(self, samples: tuple[Tensor, ...], batch_size: int, order: Order) -> None:
        self._samples, self._batch_size, self._order = samples, batch_size, order

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for chosen in torch.split(self._order.next_epoch(), self._batch_size):
            yield tuple(values[chosen] for values in self._samples)


def _samples(dataset: Dataset[Any]) -> tuple[Tensor, ...]:
    """All samples as one batch."""
    whole: Any = dataset
    if hasattr(whole, "fetch_batch"):
        samples: tuple[Tensor, ...] = whole.fetch_batch(torch.arange(len(whole)))
        return samples
    return tuple(default_collate([whole[index] for index in range(len(whole))]))
