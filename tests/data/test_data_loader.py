"""The loader: an order from (seed, epoch) alone, exact from any batch on, with any workers."""

import gc
import math
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
from mpframe.data import ArrayImages, Loader, Normalize
from mpframe.data import loading as data_loader

# From Python 3.12 on, starting a worker by fork beside torch's own threads warns; it is torch's
# way to start workers and nothing that the loader decides.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
WORKERS = [pytest.param(0), pytest.param(2, marks=forks)]

Batches = list[tuple[Tensor, Tensor]]


def numbers(count: int = 23) -> TensorDataset:
    """Samples that say who they are."""
    return TensorDataset(torch.arange(count).float(), torch.arange(count))


def pictures(count: int = 23) -> ArrayImages:
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    normalize = Normalize((0.5,), (0.5,))
    return ArrayImages(images.to(torch.uint8), torch.arange(count), normalize, "crop_flip")


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


def error_from(batches: Iterator[Any], kind: type[Exception] = DataError) -> str:
    """The text of the error the next batches raise. The error itself, which holds the frames it
    went through and with them the workers, is let go."""
    try:
        list(batches)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def same(left: Batches, right: Batches) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


# Order


def test_every_sample_once_and_another_order_each_epoch() -> None:
    loader = Loader(numbers(), 5, seed=3, shuffle=True)
    orders = [torch.cat([targets for _, targets in loader.epoch(e)]) for e in range(3)]
    assert len(loader) == 5
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(23))
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])


def test_order_is_a_function_of_seed_and_epoch() -> None:
    order = torch.cat([t for _, t in Loader(numbers(), 5, seed=3, shuffle=True).epoch(2)])
    again = Loader(numbers(), 7, seed=3, shuffle=True)
    list(again.epoch(0))  # What was read before does not matter, nor does the batch size.
    assert torch.equal(torch.cat([t for _, t in again.epoch(2)]), order)
    other = Loader(numbers(), 5, seed=4, shuffle=True)
    assert not torch.equal(torch.cat([t for _, t in other.epoch(2)]), order)


def test_without_shuffle_the_order_is_the_datasets() -> None:
    loader = Loader(numbers(), 10, shuffle=False)
    assert torch.equal(torch.cat([t for _, t in loader.epoch(4)]), torch.arange(23))


@pytest.mark.parametrize(("drop_last", "batches", "samples"), [(True, 4, 20), (False, 5, 23)])
def test_the_incomplete_batch(drop_last: bool, batches: int, samples: int) -> None:
    loader = Loader(numbers(), 5, shuffle=True, drop_last=drop_last)
    read = list(loader.epoch(0))
    assert len(loader) == len(read) == batches
    assert sum(len(targets) for _, targets in read) == samples


@pytest.mark.parametrize("shuffle", [True, False])
def test_batch_ids_name_the_samples_of_a_batch(shuffle: bool) -> None:
    loader = Loader(numbers(), 5, seed=1, shuffle=shuffle)
    for number, (_, targets) in enumerate(loader.epoch(1)):
        assert torch.equal(loader.batch_ids(1, number), targets)
        loader.batch_ids(2, 0)  # Asking about another epoch must not disturb this one.


# The same whatever the way


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("make", [pictures, Noisy])
def test_any_start_continues_exactly(make: Any, workers: int) -> None:
    whole = list(Loader(make(), 4, seed=8, shuffle=True).epoch(3))
    loader = Loader(make(), 4, seed=8, shuffle=True, workers=workers)
    for start in (0, 2, 5, 6):
        assert same(list(loader.epoch(3, start)), whole[start:])


@forks
@pytest.mark.parametrize("make", [pictures, Noisy])
def test_workers_change_nothing_over_epochs(make: Any) -> None:
    alone = Loader(make(), 4, seed=8, shuffle=True)
    helped = Loader(make(), 4, seed=8, shuffle=True, workers=2)
    next(helped.epoch(0))  # Left in the middle, as a run that validates or stops does.
    for epoch in (1, 0, 2):
        assert same(list(alone.epoch(epoch)), list(helped.epoch(epoch)))


@pytest.mark.parametrize("make", [pictures, Noisy])
def test_a_sample_is_the_same_in_any_batch_size_and_new_in_each_epoch(make: Any) -> None:
    def by_index(batch_size: int, epoch: int) -> Tensor:
        batches = Loader(make(), batch_size, seed=8, shuffle=True).epoch(epoch)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return inputs[targets.argsort()]

    assert torch.equal(by_index(4, 1), by_index(9, 1))
    assert not torch.equal(by_index(4, 1), by_index(4, 2))


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for make in (pictures, Noisy):
        list(Loader(make(), 4, shuffle=True).epoch(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_is_told_its_epoch_through_subset_and_concat(workers: int) -> None:
    inner = KnowsEpoch()
    whole = ConcatDataset([Subset(inner, [0, 1, 2]), inner])
    loader = Loader(whole, 3, seed=4, shuffle=True, workers=workers)
    for epoch in (7, 2):
        for inputs, _ in loader.epoch(epoch):
            assert torch.equal(inputs, torch.tensor([[4, epoch]] * 3))
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


def test_two_loaders_may_share_a_dataset() -> None:
    data = pictures()
    alone = list(Loader(data, 4, seed=8, shuffle=True).epoch(1))
    first, second = Loader(data, 4, seed=8, shuffle=True), Loader(data, 4, seed=9, shuffle=True)
    mixed = [left for left, _ in zip(first.epoch(1), second.epoch(5), strict=True)]
    assert same(mixed, alone)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_new_epoch_ends_the_one_before(workers: int) -> None:
    loader = Loader(numbers(), 4, shuffle=True, workers=workers)
    old = loader.epoch(0)
    next(old)
    next(loader.epoch(1))
    text = error_from(old, RuntimeError)
    assert text == "epoch 0 was ended: the loader has begun another epoch"


# Bad data and bad options


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_inputs_are_named(dtype: torch.dtype, bad: float, workers: int) -> None:
    inputs = torch.zeros(12, 3, dtype=dtype)
    inputs[[6, 7], 1] = bad
    loader = Loader(TensorDataset(inputs, torch.zeros(12)), 4, shuffle=False, workers=workers)
    batches = loader.epoch(2)
    next(batches)
    assert error_from(batches) == (
        "dataset: training sample 6 holds NaN or inf in its inputs (epoch 2, batch 1); "
        "every value must be finite: fix or remove the sample"
    )


def test_bad_targets_are_named() -> None:
    targets = torch.zeros(10)
    targets[3] = math.nan
    loader = Loader(TensorDataset(torch.zeros(10, 2), targets), 10, seed=1, shuffle=True)
    assert "training sample 3 holds NaN or inf in its targets" in error_from(loader.epoch(0))


def test_large_finite_values_pass() -> None:
    inputs = torch.full((4, 8), torch.finfo(torch.float32).max)
    assert len(list(Loader(TensorDataset(inputs, inputs), 2, shuffle=False).epoch(0))) == 2


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise DataError(f"picture {index}: cannot be read")


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_stays_one_line_through_workers(workers: int) -> None:
    loader = Loader(Unreadable(), 2, shuffle=False, workers=workers)
    assert error_from(loader.epoch(0)) == "picture 0: cannot be read"


@forks
@pytest.mark.parametrize("ending", ["read out", "left in the middle", "error"])
def test_workers_end_with_their_loader(ending: str) -> None:
    gc.disable()  # Nothing may be left to the garbage collector.
    before = multiprocessing.active_children()
    try:
        dataset = Unreadable() if ending == "error" else numbers()
        loader = Loader(dataset, 2, shuffle=True, workers=2)
        batches = loader.epoch(0)
        if ending == "error":
            error_from(batches)
        elif ending == "read out":
            list(batches)
        else:
            next(batches)
        del loader, batches
        assert [child for child in multiprocessing.active_children() if child not in before] == []
    finally:
        gc.enable()


class Odd(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (
            ["word"] * 2,
            "dataset: samples 0 to 1 make a tuple of a str, a str, which holds no",
        ),
        ([{}] * 2, "make a dict of nothing, which holds no tensor; return tensors, arrays or"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "dataset: samples 0 to 1 do not stack"),
        ([(object(), 0)], "do not stack into one batch (default_collate: batch must contain"),
    ],
)
def test_samples_that_make_no_batch(samples: list[Any], text: str) -> None:
    message = error_from(Loader(Odd(samples), 4, shuffle=False).epoch(0))
    assert text in message
    assert "\n" not in message


def test_numbers_and_arrays_become_tensors() -> None:
    samples = [(np.ones(3, dtype=np.float32), 1.5), (np.zeros(3, dtype=np.float32), 2.5)]
    inputs, targets = next(Loader(Odd(samples), 2, shuffle=False).epoch(0))
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [1.5, 2.5]


def test_a_training_set_below_one_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(numbers(1437), 4096, shuffle=True, drop_last=True)
    assert str(caught.value) == (
        "dataset.batch_size=4096: the training set has 1437 samples; use 1437 or fewer"
    )
    assert len(Loader(numbers(1437), 4096, shuffle=False)) == 1
    assert len(Loader(numbers(1437), 1437, shuffle=True, drop_last=True)) == 1


@pytest.mark.parametrize(("option", "value"), [("batch_size", 0), ("batch_size", 2.0)])
def test_batch_size_out_of_range(option: str, value: Any) -> None:
    text = f"^dataset.{option}={value}: must be a whole number >= 1$"
    with pytest.raises(ConfigError, match=text):
        Loader(numbers(), value, shuffle=True)
    with pytest.raises(ConfigError, match=f"^my.size={value}: must"):
        Loader(numbers(), value, shuffle=True, option="my.size")


def test_workers_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"^dataset.workers=-1: must be a whole number >= 0$"):
        Loader(numbers(), 4, shuffle=True, workers=-1)


@pytest.mark.parametrize("start", [-1, 7])
def test_a_start_outside_the_epoch(start: int) -> None:
    loader = Loader(numbers(), 4, shuffle=True)
    text = f"^dataset.batch_size=4: an epoch has 6 batches and cannot start at batch {start}; use"
    with pytest.raises(DataError, match=text):
        loader.epoch(0, start)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_datasets_without_samples_or_order() -> None:
    with pytest.raises(DataError, match=r"^dataset: Odd has no samples; give at least one$"):
        Loader(Odd([]), 4, shuffle=True)
    with pytest.raises(DataError, match=r"^dataset: Stream has no __len__ and __getitem__; give"):
        Loader(Stream(), 4, shuffle=True)
