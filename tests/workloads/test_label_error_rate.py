"""The label error rate against counts done by hand, in every dtype of the logits."""

import math

import pytest
import torch
from torch import Tensor

from mpframe.workloads.speech import LabelErrorRate, collapse, edit_distance

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        ([0, 0, 0], []),
        ([1, 1, 1], [1]),
        ([1, 0, 1], [1, 1]),
        ([0, 1, 1, 2, 0, 2, 2, 0], [1, 2, 2]),
        ([], []),
    ],
)
def test_what_is_read_of_the_frames(classes: list[int], labels: list[int]) -> None:
    assert collapse(classes, blank=0) == labels


def test_another_blank() -> None:
    assert collapse([2, 0, 0, 2, 0, 1, 2], blank=2) == [0, 0, 1]


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("intention", "execution", 5),
        ("ab", "ba", 2),
        ("abc", "bc", 1),
    ],
)
def test_edit_distance(first: str, second: str, distance: int) -> None:
    numbers = [[ord(letter) for letter in word] for word in (first, second)]
    assert edit_distance(*numbers) == distance == edit_distance(*numbers[::-1])


def logits(classes: list[list[int]], dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_over_batches(dtype: torch.dtype) -> None:
    """2 of 3 labels wrong in the first batch, 1 missing of 2 and none of 1 in the second: 3 / 6."""
    metric = LabelErrorRate()
    outputs = {"logits": logits([[1, 0, 2, 3]], dtype), "lengths": [3]}
    metric.update(outputs, {"labels": torch.tensor([[2, 2, 3]]), "lengths": [3]})
    outputs = {"logits": logits([[1, 1, 1], [0, 3, 1]], dtype), "lengths": [3, 2]}
    metric.update(outputs, {"labels": torch.tensor([[1, 1], [3, 0]]), "lengths": [2, 1]})
    assert torch.equal(metric.compute(), torch.tensor(3 / 6, dtype=torch.float64))


def test_before_the_first_batch_it_is_nan() -> None:
    assert math.isnan(LabelErrorRate().compute().item())
