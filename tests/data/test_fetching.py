"""Batches of any shape: dicts, nested tuples, lists of pictures of different sizes, strings."""

import math
import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from mpframe.core.errors import DataError
from mpframe.core.tree import tensors_in
from mpframe.data import Loader, digits

# From Python 3.12 on, starting a worker by fork beside torch's own threads warns.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

Pair = namedtuple("Pair", "left right")


class Samples(Dataset[Any]):
    """Eleven samples, made by a function of their index."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def text(index: int) -> dict[str, Any]:
    """As a tokenizer gives it, with what a model does not take."""
    ids = torch.arange(4) + index
    return {"input_ids": ids, "labels": index, "id": f"sample {index}", "weight": index / 8}


def nested(index: int) -> Any:
    """Nested tuples, with numbers drawn from all three global generators."""
    drawn = torch.rand(()).item(), random.random(), np.random.rand(2)
    return (torch.tensor(float(index)), (drawn[0], {"draws": drawn[1:]})), index


def picture(index: int) -> tuple[Tensor, dict[str, Any]]:
    """A picture of a size of its own, and the boxes on it."""
    boxes = torch.full((index % 3, 4), float(index))
    return torch.full((3, 4 + index, 5), float(index)), {"boxes": boxes, "name": f"{index}.png"}


def named(index: int) -> Pair:
    return Pair(torch.tensor(float(index)), {"side": index})


def listed(samples: list[Any]) -> tuple[list[Any], ...]:
    """The collate that torchvision's detection models are trained with."""
    return tuple(map(list, zip(*samples, strict=True)))


def mixed(samples: list[Any]) -> dict[str, Tensor]:
    """A collate that draws: each sample is mixed with another one of the batch."""
    values = torch.stack([torch.as_tensor(float(sample["labels"])) for sample in samples])
    share = torch.tensor([random.random(), np.random.rand()]).float().prod()
    return {"mixed": share * values + (1 - share) * values[torch.randperm(len(values))]}


def flat(batch: Any) -> Any:
    """What a batch holds, comparable by ==: paths and values of tensors, and all else."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.tolist()
    if isinstance(batch, dict):
        return type(batch), {key: flat(item) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch), [flat(item) for item in batch]
    return batch


def first_of(samples: Any, batch_size: int = 2, **options: Any) -> Any:
    data = Samples(samples) if callable(samples) else samples
    return next(Loader(data, batch_size, **{"shuffle": False, **options}).epoch(0))


def error_of(batches: Iterator[Any]) -> str:
    with pytest.raises(DataError) as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(samples: Any, batch_size: int = 2, **options: Any) -> str:
    data = Samples(samples) if callable(samples) else samples
    return error_of(Loader(data, batch_size, **{"shuffle": False, **options}).epoch(0))


# What comes out


def test_a_dict_stays_a_dict_and_strings_pass_through() -> None:
    batch = first_of(text, 3)
    assert torch.equal(batch["input_ids"], torch.arange(4) + torch.arange(3)[:, None])
    assert torch.equal(batch["labels"], torch.arange(3))
    assert torch.equal(batch["weight"], torch.arange(3, dtype=torch.float64) / 8)
    assert batch["id"] == ["sample 0", "sample 1", "sample 2"]


def test_tuples_keep_their_form_and_class() -> None:
    (number, (first, rest)), index = first_of(nested)
    assert torch.equal(number, torch.tensor([0.0, 1.0]))
    assert first.shape == (2,)
    assert [tensor.shape for tensor in tensors_in(rest)] == [(2,), (2, 2)]
    assert torch.equal(index, torch.arange(2))
    assert type(batch := first_of(named)) is Pair
    assert torch.equal(batch.right["side"], torch.arange(2))
    assert torch.equal(first_of(torch.tensor), torch.arange(2))


class Rows(TensorDataset):
    """Of a class of its own, it is asked row by row."""


@pytest.mark.parametrize(("count", "workers"), [(1, 0), pytest.param(2, 2, marks=forks), (3, 0)])
def test_rows_of_tensors_are_fetched_a_batch_at_a_time(
    count: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = torch.rand(11, 3, 2), torch.arange(11), torch.rand(11).half()
    expected = list(Loader(Rows(*tensors[:count]), 4, seed=3, shuffle=True).epoch(1))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    whole = Loader(TensorDataset(*tensors[:count]), 4, seed=3, shuffle=True, workers=workers)
    assert list(map(flat, whole.epoch(1))) == list(map(flat, expected))
    assert type(expected[0]) is tuple
    whole.close()


def test_a_collate_gets_the_single_rows() -> None:
    rows = TensorDataset(torch.arange(4.0))
    batch = first_of(rows, collate=lambda got: torch.stack([row[0] for row in got]))
    assert torch.equal(batch, torch.tensor([0.0, 1.0]))


# The same whatever the way


@pytest.mark.parametrize(
    ("make", "collate", "workers"),
    [(nested, None, 0), (picture, listed, 0), pytest.param(text, mixed, 2, marks=forks)],
)
def test_any_start_continues_exactly(make: Any, collate: Any, workers: int) -> None:
    alone = Loader(Samples(make), 3, seed=8, shuffle=True, collate=collate)
    loader = Loader(Samples(make), 3, seed=8, shuffle=True, workers=workers, collate=collate)
    torch.rand(7)  # The model's generator may stand anywhere.
    whole = [flat(batch) for batch in alone.epoch(3)]
    for start in (0, 2, 3):
        assert [flat(batch) for batch in loader.epoch(3, start)] == whole[start:]


def test_a_collate_draws_anew_for_each_batch_and_epoch() -> None:
    data = Samples(lambda index: {"labels": index % 3})  # The same three numbers in each batch.
    loader = Loader(data, 3, seed=8, shuffle=False, collate=mixed)
    drawn = [tuple(batch["mixed"].tolist()) for e in (0, 1) for batch in list(loader.epoch(e))[:3]]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize(("make", "collate"), [(nested, None), (text, mixed)])
def test_the_global_generators_are_left_alone(make: Any, collate: Any) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(Loader(Samples(make), 4, shuffle=True, collate=collate).epoch(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


# Values that are not finite: the sample and what of it


def with_pixels(index: int) -> dict[str, Any]:
    return {**text(index), "pixel_values": torch.zeros(2)}


def spoilt(make: Any, spoil: Any) -> Any:
    """The samples of `make`, number 7 of them with a value that is not finite."""
    return lambda index: spoil(make(index)) if index == 7 else make(index)


def bad_weight(sample: Any) -> Any:
    return {**sample, "weight": math.nan}


def bad_pixels(sample: Any) -> Any:
    return {**sample, "pixel_values": torch.tensor([0.0, math.inf])}


def bad_boxes(sample: Any) -> Any:
    image, target = sample
    return image, {**target, "boxes": torch.full((2, 4), -math.inf)}


def bad_inside(sample: Any) -> Any:
    return (sample[0][0], (sample[0][1][0], {"draws": (math.nan, np.zeros(2))})), sample[1]


def bad_right(sample: Pair) -> Pair:
    return Pair(torch.tensor(math.nan), sample.right)


@pytest.mark.parametrize(
    ("make", "spoil", "collate", "leaf"),
    [
        (text, bad_weight, None, "weight"),  # A number of Python's: seen once it is a tensor.
        (with_pixels, bad_pixels, None, "pixel_values"),
        (with_pixels, bad_pixels, list, "pixel_values"),
        (picture, bad_boxes, listed, "targets.boxes"),
        (nested, bad_inside, None, r"inputs[1][1].draws[0]"),
        (named, bad_right, None, "left"),
    ],
)
def test_a_value_that_is_not_finite_is_named(
    make: Any, spoil: Any, collate: Any, leaf: str
) -> None:
    data = Samples(spoilt(make, spoil))
    batches = Loader(data, 3, shuffle=False, collate=collate, split="validation").epoch(2)
    assert len([next(batches), next(batches)]) == 2
    assert error_of(batches) == (
        f"dataset: validation sample 7 holds NaN or inf in its {leaf} (epoch 2, batch 2); "
        "every value must be finite: fix or remove the sample"
    )


@forks
@pytest.mark.parametrize(
    ("dtype", "bad", "workers"),
    [
        (torch.float16, math.inf, 0),
        (torch.bfloat16, -math.inf, 0),
        (torch.float32, math.nan, 1),
        (torch.float64, -math.inf, 0),
    ],
)
def test_a_row_of_a_batch_that_is_not_finite_is_named(
    dtype: torch.dtype, bad: float, workers: int
) -> None:
    """The first one of the dataset's, in whatever order they are read."""
    inputs = torch.full((12, 3), torch.finfo(dtype).max, dtype=dtype)  # Large values pass.
    inputs[[6, 7], 1] = bad
    data = TensorDataset(inputs, torch.zeros(12))
    loader = Loader(data, 12, seed=3, shuffle=True, workers=workers)
    assert "training sample 6 holds NaN or inf in its inputs (epoch 1, batch 0)" in error_of(
        loader.epoch(1)
    )


@pytest.mark.parametrize(
    "made", [torch.tensor(math.nan), torch.tensor([[0.0, math.nan], [1.0, 0.0]]).to_sparse()]
)
def test_what_a_collate_makes_that_is_not_finite(made: Tensor) -> None:
    assert "training one of samples 0 to 1 holds NaN or inf in its x (epoch 0" in refused(
        text, collate=lambda _: {"x": made}
    )


# Samples that make no batch


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        (
            str,
            "dataset: samples 0 to 1 make a tuple of a str, a str, which holds no tensor; return "
            "tensors, arrays or numbers, alone or in tuples, lists and dicts",
        ),
        (lambda _: {}, "dataset: samples 0 to 1 make a dict of nothing, which holds no tensor; "),
        (lambda _: object(), "do not stack into one batch (default_collate: batch must contain"),
        (
            picture,
            "dataset: samples 0 to 1 do not stack into one batch (stack expects each tensor to be "
            "equal size, but got [3, 4, 5] at entry 0 and [3, 5, 5] at entry 1); give every sample "
            "the same shapes, or give its Task a collate that makes a batch of a list of samples",
        ),
        (TensorDataset(torch.eye(6).to_sparse()), "samples 0 to 1 do not stack into one batch"),
    ],
)
def test_samples_that_make_no_batch(samples: Any, line: str) -> None:
    assert line in refused(samples)


def test_samples_of_a_shuffled_batch_are_listed() -> None:
    loader = Loader(Samples(str), 5, seed=2, shuffle=True)
    first = ", ".join(map(str, loader.batch_ids(0, 0).tolist()[:3]))
    assert f"dataset: samples {first} and 2 more make a tuple" in error_of(loader.epoch(0))


def raising(samples: list[Any]) -> Any:
    raise KeyError("labels")


@forks
def test_a_collate_that_raises_is_one_line() -> None:
    assert refused(text, workers=1, collate=raising) == (
        "dataset: samples 0 to 1 cannot be collated: KeyError ('labels') at "
        f"test_fetching.py:{raising.__code__.co_firstlineno + 1}; fix the collate of its Task"
    )


def test_a_collate_beside_whole_batches() -> None:
    with pytest.raises(DataError) as caught:
        Loader(digits().train, 4, shuffle=False, collate=listed)
    assert str(caught.value) == (
        "dataset: ArrayImages makes whole batches by its fetch_batch, and its Task has the collate "
        "listed; give one of the two"
    )


@forks
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_pinned_memory(workers: int) -> None:
    loader = Loader(Samples(picture), 4, shuffle=False, workers=workers, collate=listed, pin=True)
    for batch in loader.epoch(0):
        assert all(tensor.is_pinned() for tensor in tensors_in(batch))
