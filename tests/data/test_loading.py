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
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import ArrayImages, Loader, Normalize, digits
from mpframe.data import loading as data_loader

# From Python 3.12 on, starting a worker by fork beside torch's own threads warns.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

Batches = list[tuple[Tensor, Tensor]]


def numbers(count: int = 23) -> TensorDataset:
    """Samples that say who they are."""
    return TensorDataset(torch.arange(count).float(), torch.arange(count))


def pictures() -> ArrayImages:
    images = torch.randint(0, 256, (23, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    normalize = Normalize((0.5,), (0.5,))
    return ArrayImages(images.to(torch.uint8), torch.arange(23), normalize, "crop_flip")


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


def same(left: Batches, right: Batches) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def order_of(loader: Loader, epoch: int) -> Tensor:
    return torch.cat([targets for _, targets in loader.epoch(epoch)])


# Order


def test_order_is_a_function_of_seed_and_epoch() -> None:
    loader = Loader(numbers(), 5, seed=3, shuffle=True)
    orders = [order_of(loader, epoch) for epoch in range(3)]
    assert all(torch.equal(order.sort().values, torch.arange(23)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])
    # What was read before does not matter, nor does the batch size.
    assert torch.equal(order_of(Loader(numbers(), 7, seed=3, shuffle=True), 2), orders[2])
    assert not torch.equal(order_of(Loader(numbers(), 5, seed=4, shuffle=True), 2), orders[2])
    assert torch.equal(order_of(Loader(numbers(), 10, shuffle=False), 4), torch.arange(23))


@pytest.mark.parametrize(("drop_last", "batches", "samples"), [(True, 4, 20), (False, 5, 23)])
def test_the_incomplete_batch(drop_last: bool, batches: int, samples: int) -> None:
    loader = Loader(numbers(), 5, shuffle=True, drop_last=drop_last)
    assert len(loader) == len(list(loader.epoch(0))) == batches
    assert len(order_of(loader, 1)) == samples


def test_batch_ids_name_the_samples_of_a_batch() -> None:
    loader = Loader(numbers(), 5, seed=1, shuffle=True)
    for number, (_, targets) in enumerate(loader.epoch(1)):
        assert torch.equal(loader.batch_ids(1, number), targets)
        loader.batch_ids(2, 0)  # Asking about another epoch must not disturb this one.


# The same whatever the way


@forks
@pytest.mark.parametrize("make", [pictures, Noisy])
def test_workers_change_nothing_over_epochs(make: Any) -> None:
    alone = Loader(make(), 4, seed=8, shuffle=True)
    helped = Loader(make(), 4, seed=8, shuffle=True, workers=2)
    next(helped.epoch(0))  # Left in the middle, as a run that validates or stops does.
    for epoch, start in ((1, 0), (0, 2), (2, 6)):
        assert same(list(alone.epoch(epoch))[start:], list(helped.epoch(epoch, start)))


@pytest.mark.parametrize("make", [pictures, Noisy])
def test_a_sample_is_the_same_in_any_batch_size_and_new_in_each_epoch(make: Any) -> None:
    def by_index(batch_size: int, epoch: int) -> Tensor:
        batches = Loader(make(), batch_size, seed=8, shuffle=True).epoch(epoch)
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
    for epoch in (0, 3):
        for batch in loader.epoch(epoch):
            assert type(batch) is tuple
            for tensor in batch:
                digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == recorded


def test_a_dataset_is_told_its_epoch_through_subset_and_concat() -> None:
    inner = KnowsEpoch()
    whole = ConcatDataset([Subset(inner, [0, 1, 2]), inner])
    loader = Loader(whole, 3, seed=4, shuffle=True)
    for epoch in (7, 2):
        for inputs, _ in loader.epoch(epoch):
            assert torch.equal(inputs, torch.tensor([[4, epoch]] * 3))
    assert inner.told == (-1, -1)


def test_two_loaders_may_share_a_dataset() -> None:
    data = pictures()
    alone = list(Loader(data, 4, seed=8, shuffle=True).epoch(1))
    first, second = Loader(data, 4, seed=8, shuffle=True), Loader(data, 4, seed=9, shuffle=True)
    assert same([left for left, _ in zip(first.epoch(1), second.epoch(5), strict=True)], alone)


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
@pytest.mark.parametrize("ending", ["read out", "left in the middle", "error"])
def test_workers_end_with_their_loader(ending: str) -> None:
    gc.disable()  # Nothing may be left to the garbage collector.
    before = multiprocessing.active_children()
    try:
        dataset = Unreadable() if ending == "error" else numbers()
        loader = Loader(dataset, 2, shuffle=False, workers=2)
        batches = loader.epoch(0)
        if ending == "error":
            try:
                list(batches)
            except DataError as error:  # pytest.raises would keep the frames, and the workers.
                assert str(error) == "picture 0: cannot be read"  # noqa: PT017
        elif ending == "read out":
            list(batches)
        else:
            next(batches)
        del loader, batches
        assert [child for child in multiprocessing.active_children() if child not in before] == []
    finally:
        gc.enable()


# What is refused


def test_a_training_set_below_one_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(numbers(), 24, shuffle=True, drop_last=True)
    assert str(caught.value) == (
        "dataset.batch_size=24: the training set has 23 samples; use 23 or fewer"
    )
    assert len(Loader(numbers(), 24, shuffle=False)) == 1
    assert len(Loader(numbers(), 23, shuffle=True, drop_last=True)) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "dataset.batch_size=0: must be a whole number >= 1"),
        ({"batch_size": 2.0, "option": "my.size"}, "my.size=2.0: must be a whole number >= 1"),
        ({"workers": -1}, "dataset.workers=-1: must be a whole number >= 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}$"):
        Loader(numbers(), **{"batch_size": 4, "shuffle": True, **options})


@pytest.mark.parametrize("start", [-1, 7])
def test_a_start_outside_the_epoch(start: int) -> None:
    text = f"^dataset.batch_size=4: an epoch has 6 batches and cannot start at batch {start}; use"
    with pytest.raises(DataError, match=text):
        Loader(numbers(), 4, shuffle=True).epoch(0, start)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_datasets_without_samples_or_order() -> None:
    with pytest.raises(DataError, match=r"^dataset: list has no samples; give at least one$"):
        Loader([], 4, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^dataset: Stream has no __len__ and __getitem__; give"):
        Loader(Stream(), 4, shuffle=True)
