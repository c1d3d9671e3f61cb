"""Batches of any shape: dicts, nested tuples, lists of pictures of different sizes, strings."""

import math
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import forks, refused
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from vocabulary import differing

from mpframe.core.errors import DataError
from mpframe.core.tree import tensors_in
from mpframe.data import ArrayImages, Loader, Normalize

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


def listed(samples: list[Any]) -> tuple[list[Any], ...]:
    """The collate that torchvision's detection models are trained with."""
    return tuple(map(list, zip(*samples, strict=True)))


def mixed(samples: list[Any]) -> dict[str, Tensor]:
    """A collate that draws: each sample is mixed with another one of the batch."""
    values = torch.stack([torch.as_tensor(float(sample["labels"])) for sample in samples])
    share = torch.tensor([random.random(), np.random.rand()]).float().prod()
    return {"mixed": share * values + (1 - share) * values[torch.randperm(len(values))]}


IMAGES = ArrayImages(torch.rand(11, 1, 8, 8), torch.arange(11), Normalize((0,), (1,)), "crop_flip")


def raising(samples: list[Any]) -> Any:
    raise KeyError("labels")


def loader(samples: Any, batch_size: int = 2, **options: Any) -> Loader:
    data = Samples(samples) if callable(samples) else samples
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


class Rows(TensorDataset):
    """Of a class of its own, it is asked row by row."""


@pytest.mark.parametrize(("count", "workers"), [(1, 0), pytest.param(3, 2, marks=forks)])
def test_rows_of_tensors_are_fetched_a_batch_at_a_time(
    count: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = (torch.rand(11, 3, 2), torch.arange(11), torch.rand(11).half())[:count]
    expected = list(loader(Rows(*tensors), 4, seed=3, shuffle=True).epoch(1))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)
    whole = loader(TensorDataset(*tensors), 4, seed=3, shuffle=True, workers=workers)
    assert not differing(list(whole.epoch(1)), expected)
    whole.close()


def test_a_collate_gets_the_single_rows() -> None:
    rows = TensorDataset(torch.arange(4.0))
    batch = first_of(rows, collate=lambda got: torch.stack([row[0] for row in got]))
    assert torch.equal(batch, torch.tensor([0.0, 1.0]))


def generators() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


@forks
@pytest.mark.parametrize(
    ("make", "collate", "workers"),
    [(nested, None, 2), (picture, listed, 0), (text, mixed, 2), (IMAGES, None, 2)],
)
def test_any_start_continues_exactly_and_leaves_the_global_generators_alone(
    make: Any, collate: Any, workers: int
) -> None:
    alone = loader(make, 3, seed=8, shuffle=True, collate=collate)
    helped = loader(make, 3, seed=8, shuffle=True, workers=workers, collate=collate)
    torch.rand(7)  # The model's generator may stand anywhere.
    next(helped.epoch(0))  # Left in the middle, as a run that validates or stops does.
    before = generators()
    whole = list(alone.epoch(3))
    assert not differing(generators(), before)
    for start in (0, 2, 3):
        assert not differing(list(helped.epoch(3, start)), whole[start:])


def test_a_collate_draws_anew_for_each_batch_and_epoch() -> None:
    same = loader(lambda index: {"labels": index % 3}, 3, seed=8, collate=mixed)
    drawn = [tuple(batch["mixed"].tolist()) for e in (0, 1) for batch in list(same.epoch(e))[:3]]
    assert len(set(drawn)) == 6


# Values that are not finite: the sample and what of it

NAN = torch.tensor(math.nan)


@pytest.mark.parametrize(
    ("make", "bad", "collate", "leaf"),
    [
        (text, lambda s: {**s, "weight": math.nan}, None, "weight"),  # Python's: once a tensor.
        (text, lambda s: {**s, "pixels": torch.tensor([0.0, math.inf])}, list, "pixels"),
        (picture, lambda s: (s[0], {"boxes": NAN.expand(2, 4)}), listed, "targets.boxes"),
        (nested, lambda s: ((s[0][0], (0.0, {"draws": (math.nan, np.zeros(2))})), 1), None,
         "inputs[1][1].draws[0]"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_named(make: Any, bad: Any, collate: Any, leaf: str) -> None:
    spoilt = Samples(lambda index: bad(make(index)) if index == 7 else make(index))
    batches = loader(spoilt, 3, collate=collate, split="validation").epoch(2)
    assert len([next(batches), next(batches)]) == 2
    assert refused(DataError, list, batches) == (
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
    batches = loader(data, 12, seed=3, shuffle=True, workers=workers).epoch(1)
    text = refused(DataError, list, batches)
    assert "training sample 6 holds NaN or inf in its inputs (epoch 1, batch 0)" in text


# Samples that make no batch


RAISED = f"KeyError ('labels') at test_fetching.py:{raising.__code__.co_firstlineno + 1}; fix the"


@pytest.mark.parametrize(
    ("samples", "options", "line"),
    [
        (text, {"collate": lambda _: {"x": NAN}}, "1 holds NaN or inf in its x (epoch 0"),
        (text, {"collate": lambda _: {"x": NAN.expand(2, 2).to_sparse()}}, "NaN or inf in its x"),
        (str, {}, "samples 0 to 1 make a tuple of a str, a str, which holds no tensor; return te"),
        (str, {"batch_size": 5, "shuffle": True}, " and 2 more make a tuple of a str"),
        (lambda _: {}, {}, "samples 0 to 1 make a dict of nothing, which holds no tensor; "),
        (lambda _: object(), {}, "do not stack into one batch (default_collate: batch must con"),
        (picture, {}, "do not stack into one batch (stack expects each tensor to be equal size, "
         "but got [3, 4, 5] at entry 0 and [3, 5, 5] at entry 1); give every sample the same shap"),
        (TensorDataset(torch.eye(6).to_sparse()), {}, "samples 0 to 1 do not stack into one batch"),
        pytest.param(text, {"collate": raising, "workers": 1}, f"collated: {RAISED}", marks=forks),
        (IMAGES, {"collate": listed}, "ArrayImages makes whole batches by its fetch_batch, and its "
         "Task has the collate listed; give one of the two"),
    ],
)  # fmt: skip
def test_what_makes_no_batch(samples: Any, options: dict[str, Any], line: str) -> None:
    assert line in refused(DataError, lambda: list(loader(samples, **options).epoch(0)))


@forks
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_pinned_memory(workers: int) -> None:
    for batch in loader(picture, 4, workers=workers, collate=listed, pin=True).epoch(0):
        assert all(tensor.is_pinned() for tensor in tensors_in(batch))
