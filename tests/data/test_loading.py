"""The loader: an order from (seed, epoch) alone, exact from any batch on, with any workers."""

import gc
import hashlib
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import forks, refused
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader, digits
from mpframe.data import loading as data_loader


def numbers() -> TensorDataset:
    """Samples that say who they are."""
    return TensorDataset(torch.arange(23).float(), torch.arange(23))


class Noisy(Dataset[Any]):
    """A user's dataset whose transforms draw from all three global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *draws]), index


class KnowsEpoch(Dataset[Any]):
    """A user's dataset that asks to be told its epoch."""

    told = (-1, -1)

    def set_epoch(self, seed: int, epoch: int) -> None:
        self.told = (seed, epoch)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.told), index


def order_of(epoch: int, batch_size: int = 5, seed: int = 3, **options: Any) -> Tensor:
    loader = Loader(numbers(), batch_size, **{"seed": seed, "shuffle": True, **options})
    read = list(loader.epoch(epoch))
    for number, (_, targets) in enumerate(read):
        assert torch.equal(loader.batch_ids(epoch, number), targets)
    assert len(loader) == len(read)
    return torch.cat([targets for _, targets in read])


def test_order_is_a_function_of_seed_and_epoch() -> None:
    orders = [order_of(epoch) for epoch in range(3)]
    assert all(torch.equal(order.sort().values, torch.arange(23)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])
    assert torch.equal(order_of(2, batch_size=7), orders[2])
    assert torch.equal(order_of(2, drop_last=True), orders[2][:20])
    assert not torch.equal(order_of(2, seed=4), orders[2])
    assert torch.equal(order_of(4, shuffle=False), torch.arange(23))


def test_a_sample_is_the_same_in_any_batch_size_and_new_in_each_epoch() -> None:
    def by_index(batch_size: int, epoch: int) -> Tensor:
        batches = Loader(Noisy(), batch_size, seed=8, shuffle=True).epoch(epoch)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return inputs[targets.argsort()]

    assert torch.equal(by_index(4, 1), by_index(9, 1))
    assert not torch.equal(by_index(4, 1), by_index(4, 2))


@pytest.mark.parametrize(
    ("make", "workers", "recorded"),
    [
        (numbers, 0, "1776b517e5fc8af3"),
        pytest.param(Noisy, 2, "bc776e5f427ba0e1", marks=forks),
        (lambda: digits(augment="crop_flip").train, 0, "5acad126b34013eb"),
    ],
)
def test_batches_are_what_they_were(make: Any, workers: int, recorded: str) -> None:
    """Recorded with the loader that knew (inputs, targets) alone."""
    digest = hashlib.sha256()
    loader = Loader(make(), 5, seed=8, shuffle=True, workers=workers)
    for batch in (*loader.epoch(0), *loader.epoch(3)):
        assert type(batch) is tuple
        for tensor in batch:
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == recorded


def test_loaders_may_share_a_dataset_that_is_told_its_epoch_through_subset_and_concat() -> None:
    inner = KnowsEpoch()
    whole = ConcatDataset([Subset(inner, [0, 1, 2]), inner])
    first, second = (Loader(whole, 3, seed=seed, shuffle=True) for seed in (4, 5))
    for epoch in (7, 2):
        for pair in zip(first.epoch(epoch), second.epoch(9), strict=True):
            told = [inputs for inputs, _ in pair]
            assert told[0].tolist() == [[4, epoch]] * 3
            assert told[1].tolist() == [[5, 9]] * 3
    assert inner.told == (-1, -1)


def test_the_wait_for_batches_is_counted_and_what_the_caller_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Slow(KnowsEpoch):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            now[0] += 2.0
            return super().__getitem__(index)

    monkeypatch.setattr(data_loader, "perf_counter", lambda: now[0])
    loader = Loader(Slow(), batch_size=3, shuffle=True)
    assert loader.waited == 0.0
    for epoch in (0, 1):
        for number, _ in enumerate(loader.epoch(epoch), start=1):
            assert loader.waited == 12.0 * epoch + 6.0 * number
            now[0] += 100.0


def test_a_new_epoch_ends_the_one_before() -> None:
    loader = Loader(numbers(), 4, shuffle=True)
    old = loader.epoch(0)
    next(old)
    next(loader.epoch(1))
    with pytest.raises(RuntimeError, match="epoch 0 was ended: the loader has begun another epoch"):
        next(old)


class Unreadable(KnowsEpoch):
    def __getitem__(self, index: int) -> Any:
        raise DataError(f"picture {index}: cannot be read")


@forks
@pytest.mark.parametrize(("data", "read"), [(numbers, 12), (numbers, 1), (Unreadable, 1)])
def test_workers_end_with_their_loader(data: Any, read: int) -> None:
    """After an epoch, in the middle of one, and after an error."""
    gc.disable()  # Nothing may be left to the garbage collector.
    before = multiprocessing.active_children()
    try:
        loader = Loader(data(), 2, shuffle=False, workers=2)
        batches = loader.epoch(0)
        try:
            for _ in range(read):
                next(batches)
        except DataError as error:  # pytest.raises would keep the frames, and the workers.
            assert str(error) == "picture 0: cannot be read"  # noqa: PT017
        del loader, batches
        assert [child for child in multiprocessing.active_children() if child not in before] == []
    finally:
        gc.enable()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


WHOLE = "must be a whole number >="


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (None, {"batch_size": 24, "drop_last": True},
         "dataset.batch_size=24: the training set has 23 samples; use 23 or fewer"),
        (None, {"batch_size": 0}, f"dataset.batch_size=0: {WHOLE} 1"),
        (None, {"batch_size": 2.0, "option": "my.size"}, f"my.size=2.0: {WHOLE} 1"),
        (None, {"workers": -1}, f"dataset.workers=-1: {WHOLE} 0"),
        ([], {}, "dataset: list has no samples; give at least one"),
        (Stream(), {}, "dataset: Stream has no __len__ and __getitem__; give"),
    ],
)  # fmt: skip
def test_what_no_loader_can_be_made_of(data: Any, options: dict[str, Any], text: str) -> None:
    error = ConfigError if data is None else DataError
    given = {"dataset": numbers() if data is None else data, "batch_size": 4, "shuffle": True}
    assert refused(error, Loader, **{**given, **options}).startswith(text)


def test_the_ends_of_batch_size_and_start() -> None:
    assert len(Loader(numbers(), 24, shuffle=False)) == 1
    assert len(Loader(numbers(), 23, shuffle=True, drop_last=True)) == 1
    epoch = Loader(numbers(), 4, shuffle=True).epoch
    for start in (-1, 7):
        text = f"dataset.batch_size=4: an epoch has 6 batches and cannot start at batch {start}; "
        assert text in refused(DataError, epoch, 0, start)
