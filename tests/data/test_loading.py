"""The loader: batches of any shape, in an order from (seed, epoch) alone, with any workers."""

import gc
import hashlib
import math
import multiprocessing
import random
from collections import namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, forks, refused
from own_parts import Made
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.tree import tensors_in
from mpframe.data import ArrayImages, Loader, Normalize, digits
from mpframe.data import loading as data_loader

Pair = namedtuple("Pair", "left right")


def text(index: int) -> dict[str, Any]:
    """As a tokenizer gives it, with what a model does not take."""
    ids = torch.arange(4) + index
    return {"input_ids": ids, "labels": index, "id": f"sample {index}", "weight": index / 8}


def noisy(index: int) -> tuple[Tensor, int]:
    """As a user's transforms make them, which draw from all three global generators."""
    draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    return torch.tensor([float(index), *draws]), index


def nested(index: int) -> Any:
    """Nested tuples, with such numbers."""
    drawn = torch.rand(()).item(), random.random(), np.random.rand(2)
    return (torch.tensor(float(index)), (drawn[0], {"draws": drawn[1:]})), index


def picture(index: int) -> tuple[Tensor, dict[str, Any]]:
    boxes = torch.full((index % 3, 4), float(index))
    return torch.full((3, 4 + index, 5), float(index)), {"boxes": boxes, "name": f"{index}.png"}


def listed(samples: list[Any]) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*samples, strict=True)))


def mixed(samples: list[Any]) -> dict[str, Tensor]:
    """A collate that draws: each sample is mixed with another one of the batch."""
    values = torch.stack([torch.as_tensor(float(sample["labels"])) for sample in samples])
    share = torch.tensor([random.random(), np.random.rand()]).float().prod()
    return {"mixed": share * values + (1 - share) * values[torch.randperm(len(values))]}


IMAGES = ArrayImages(torch.rand(11, 1, 8, 8), torch.arange(11), Normalize((0,), (1,)), "crop_flip")


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(23).float(), torch.arange(23))


def loader(samples: Any, batch_size: int = 2, **options: Any) -> Loader:
    data = Made(samples) if callable(samples) else samples
    return Loader(data, batch_size, **{"shuffle": False, **options})


def first_of(samples: Any, batch_size: int = 2, **options: Any) -> Any:
    return next(loader(samples, batch_size, **options).epoch(0))


def test_a_batch_has_the_form_of_its_samples() -> None:
    batch = first_of(text, 3)
    assert torch.equal(batch["input_ids"], torch.arange(4) + torch.arange(3)[:, None])
    assert torch.equal(batch["labels"], torch.arange(3))
    assert torch.equal(batch["weight"], torch.arange(3, dtype=torch.float64) / 8)
    assert batch["id"] == ["sample 0", "sample 1", "sample 2"]
    (number, (first, rest)), index = first_of(nested)
    assert torch.equal(number, torch.tensor([0.0, 1.0]))
    assert [tensor.shape for tensor in tensors_in([first, rest])] == [(2,), (2,), (2, 2)]
    assert torch.equal(index, torch.arange(2))
    batch = first_of(lambda index: Pair(torch.tensor(float(index)), {"side": index}))
    assert type(batch) is Pair
    assert torch.equal(batch.right["side"], torch.arange(2))
    assert torch.equal(first_of(torch.tensor), torch.arange(2))


@pytest.mark.parametrize(("count", "workers"), [(1, 0), pytest.param(3, 2, marks=forks)])
def test_rows_are_fetched_a_batch_at_a_time(count: int, workers: int, monkeypatch: Patch) -> None:
    tensors = (torch.rand(11, 3, 2), torch.arange(11), torch.rand(11).half())[:count]
    rows = loader(lambda index: tuple(tensor[index] for tensor in tensors), 4, seed=3, shuffle=True)
    expected = list(rows.epoch(1))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    whole = loader(TensorDataset(*tensors), 4, seed=3, shuffle=True, workers=workers)
    assert not differing(list(whole.epoch(1)), expected)
    whole.close()


@forks
@pytest.mark.parametrize(
    ("make", "collate", "workers"),
    [(nested, None, 2), (picture, listed, 0), (text, mixed, 2), (IMAGES, None, 2)],
)
def test_any_start_is_exact_and_leaves_the_generators(
    make: Any, collate: Any, workers: int
) -> None:
    alone = loader(make, 3, seed=8, shuffle=True, collate=collate)
    helped = loader(make, 3, seed=8, shuffle=True, workers=workers, collate=collate)
    torch.rand(7)  # The model's generator may stand anywhere.
    next(helped.epoch(0))  # Left in the middle, as a run that validates or stops does.
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole = list(alone.epoch(3))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert not differing(after, before)
    for start in (0, 2, 3):
        assert not differing(list(helped.epoch(3, start)), whole[start:])


def test_a_collate_gets_the_single_rows_and_draws_anew_for_each_batch_and_epoch() -> None:
    rows = TensorDataset(torch.arange(4.0))
    assert first_of(rows, collate=list) == [(torch.tensor(0.0),), (torch.tensor(1.0),)]
    same = loader(lambda index: {"labels": index % 3}, 3, seed=8, collate=mixed)
    drawn = [tuple(batch["mixed"].tolist()) for e in (0, 1) for batch in list(same.epoch(e))[:3]]
    assert len(set(drawn)) == 6


NAN = torch.tensor(math.nan)


@pytest.mark.parametrize(("make", "bad", "collate", "leaf"), [
    (text, lambda s: {**s, "weight": math.nan}, None, "weight"),  # Python's: once a tensor.
    (text, lambda s: {**s, "pixels": torch.tensor([0.0, math.inf])}, list, "pixels"),
    (picture, lambda s: (s[0], {"boxes": NAN.expand(2, 4)}), listed, "targets.boxes"),
    (nested, lambda s: ((s[0][0], (0.0, {"draws": (math.nan, np.zeros(2))})), 1), None,
     "inputs[1][1].draws[0]"),
])  # fmt: skip
def test_a_value_that_is_not_finite_is_named(make: Any, bad: Any, collate: Any, leaf: str) -> None:
    spoilt = Made(lambda index: bad(make(index)) if index == 7 else make(index))
    batches = loader(spoilt, 3, collate=collate, split="validation").epoch(2)
    assert len([next(batches), next(batches)]) == 2
    assert refused(DataError, list, batches) == (
        f"dataset: validation sample 7 holds NaN or inf in its {leaf} (epoch 2, batch 2); "
        "every value must be finite: fix or remove the sample"
    )


@forks
@pytest.mark.parametrize(("dtype", "bad", "workers"), [
    (torch.float16, math.inf, 0), (torch.bfloat16, -math.inf, 0), (torch.float32, math.nan, 1),
])  # fmt: skip
def test_a_row_of_a_batch_that_is_not_finite_is_named(dtype: Any, bad: float, workers: int) -> None:
    """The first one of the dataset's, in whatever order they are read."""
    inputs = torch.full((12, 3), torch.finfo(dtype).max, dtype=dtype)  # Large values pass.
    inputs[[6, 7], 1] = bad
    data = TensorDataset(inputs, torch.zeros(12))
    batches = loader(data, 12, seed=3, shuffle=True, workers=workers).epoch(1)
    text = refused(DataError, list, batches)
    assert "training sample 6 holds NaN or inf in its inputs (epoch 1, batch 0)" in text


@pytest.mark.parametrize(("samples", "options", "line"), [
    (text, {"collate": lambda _: {"x": NAN}}, "1 holds NaN or inf in its x (epoch 0"),
    (text, {"collate": lambda _: {"x": NAN.expand(2, 2).to_sparse()}}, "NaN or inf in its x"),
    (lambda _: object(), {"batch_size": 5, "shuffle": True}, " and 2 more do not stack into one b"),
    (lambda _: object(), {}, "do not stack into one batch (default_collate: batch must con"),
    (picture, {}, "do not stack into one batch (stack expects each tensor to be equal size, "
     "but got [3, 4, 5] at entry 0 and [3, 5, 5] at entry 1); give every sample the same shap"),
    (TensorDataset(torch.eye(6).to_sparse()), {}, "samples 0 to 1 cannot be read: NotImplement"),
    pytest.param(text, {"collate": lambda _: {}["labels"], "workers": 1}, "collated: KeyError ('lab"
                 "els') at test_loading.py:", marks=forks),
    (IMAGES, {"collate": listed}, "ArrayImages makes whole batches by its fetch_batch, and its "
     "Task has the collate listed; give one of the two"),
])  # fmt: skip
def test_what_makes_no_batch(samples: Any, options: dict[str, Any], line: str) -> None:
    assert line in refused(DataError, lambda: list(loader(samples, **options).epoch(0)))


@forks
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_pinned_memory(workers: int) -> None:
    for batch in loader(picture, 4, workers=workers, collate=listed, pin=True).epoch(0):
        assert all(tensor.is_pinned() for tensor in tensors_in(batch))


class KnowsEpoch(Made):
    told = (-1, -1)

    def set_epoch(self, seed: int, epoch: int) -> None:
        self.told = (seed, epoch)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.told), index


def order_of(epoch: int, batch_size: int = 5, seed: int = 3, **options: Any) -> Tensor:
    own = loader(numbers(), batch_size, **{"seed": seed, "shuffle": True, **options})
    read = list(own.epoch(epoch))
    for number, (_, targets) in enumerate(read):
        assert torch.equal(own.batch_ids(epoch, number), targets)
    assert len(own) == len(read)
    return torch.cat([targets for _, targets in read])


def test_order_is_a_function_of_seed_and_epoch_and_a_sample_of_its_index_too() -> None:
    orders = [order_of(epoch) for epoch in range(3)]
    assert all(torch.equal(order.sort().values, torch.arange(23)) for order in orders)
    others = orders[0], orders[2], order_of(1, seed=4)
    assert not any(torch.equal(other, orders[1]) for other in others)
    assert torch.equal(order_of(2, batch_size=7), orders[2])
    assert torch.equal(order_of(2, drop_last=True), orders[2][:20])
    assert torch.equal(order_of(4, shuffle=False), torch.arange(23))

    def by_index(batch_size: int, epoch: int) -> Tensor:
        batches = loader(noisy, batch_size, seed=8, shuffle=True).epoch(epoch)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return inputs[targets.argsort()]

    assert torch.equal(by_index(4, 1), by_index(9, 1))
    assert not torch.equal(by_index(4, 1), by_index(4, 2))


@forks
@pytest.mark.parametrize(("make", "workers", "recorded"), [
    (numbers, 0, "1776b517e5fc8af3"), (lambda: Made(noisy, 23), 2, "bc776e5f427ba0e1"),
    (lambda: digits(augment="crop_flip").train, 0, "5acad126b34013eb"),
])  # fmt: skip
def test_batches_are_what_they_were(make: Any, workers: int, recorded: str) -> None:
    """Recorded with the loader that knew (inputs, targets) alone."""
    digest = hashlib.sha256()
    own = loader(make(), 5, seed=8, shuffle=True, workers=workers)
    for batch in (*own.epoch(0), *own.epoch(3)):
        assert type(batch) is tuple
        for tensor in batch:
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == recorded


def test_loaders_may_share_a_dataset_that_is_told_its_epoch_through_subset_and_concat() -> None:
    inner = KnowsEpoch(None, 6)
    whole = ConcatDataset([Subset(inner, [0, 1, 2]), inner])
    first, second = (loader(whole, 3, seed=seed, shuffle=True) for seed in (4, 5))
    for epoch in (7, 2):
        for batches in zip(first.epoch(epoch), second.epoch(9), strict=True):
            told = [inputs.tolist() for inputs, _ in batches]
            assert told == [[[4, epoch]] * 3, [[5, 9]] * 3]
    assert inner.told == (-1, -1)


def test_the_wait_for_batches_is_counted_without_what_the_caller_does(monkeypatch: Patch) -> None:
    now = [0.0]

    def slow(index: int) -> Tensor:
        now[0] += 2.0
        return torch.zeros(1)

    monkeypatch.setattr(data_loader, "perf_counter", lambda: now[0])
    loading = loader(Made(slow, 6), 3)
    assert loading.waited == 0.0
    for epoch in (0, 1):
        for number, _ in enumerate(loading.epoch(epoch), start=1):
            assert loading.waited == 12.0 * epoch + 6.0 * number
            now[0] += 100.0


@forks
@pytest.mark.parametrize(("make", "read"), [(text, 6), (text, 1), (lambda _: 1 / 0, 1)])
def test_workers_end_with_their_loader(make: Any, read: int) -> None:
    """After an epoch, in the middle of one, and after an error: not by the garbage collector."""
    gc.disable()
    before, batches = multiprocessing.active_children(), loader(make, workers=2).epoch(0)
    with suppress(DataError):  # pytest.raises would keep the frames, and the workers.
        for _ in range(read):
            next(batches)
    del batches
    left = multiprocessing.active_children()
    gc.enable()
    assert [child for child in left if child not in before] == []


WHOLE = "must be a whole number >="
STREAM: Any = type("Stream", (IterableDataset,), {"__iter__": None})()


def test_an_epoch_begins_within_its_batches_and_ends_the_one_before() -> None:
    for data, options, text in (
        (
            numbers(),
            {"batch_size": 24, "drop_last": True},
            "dataset.batch_size=24: the training s",
        ),
        (numbers(), {"batch_size": 0}, f"dataset.batch_size=0: {WHOLE} 1"),
        (numbers(), {"batch_size": 2.0, "option": "my.size"}, f"my.size=2.0: {WHOLE} 1"),
        (numbers(), {"workers": -1}, f"dataset.workers=-1: {WHOLE} 0"),
        ([], {}, "dataset: list has no samples; give at least one"),
        (STREAM, {}, "dataset: Stream has no __len__ and __getitem__; give"),
    ):
        assert refused((ConfigError, DataError), loader, data, **options).startswith(text)
    assert len(loader(numbers(), 24)) == len(loader(numbers(), 23, drop_last=True)) == 1
    own = loader(numbers(), 4)
    for start in (-1, 7):
        text = f"dataset.batch_size=4: an epoch has 6 batches and cannot start at batch {start}; "
        assert text in refused(DataError, own.epoch, 0, start)
    next(old := own.epoch(0))
    next(own.epoch(1))
    with pytest.raises(RuntimeError, match="epoch 0 was ended: the loader has begun another epoch"):
        next(old)
