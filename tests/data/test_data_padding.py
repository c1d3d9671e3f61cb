"""Batches of sequences of different lengths, against rows written by hand."""

import pytest
import torch

from mpframe.workloads.text.classification import pad_batch

SAMPLES = [
    {"input_ids": torch.tensor([2, 7, 3], dtype=torch.int32), "labels": torch.tensor(1)},
    {"input_ids": torch.tensor([2, 3], dtype=torch.int32), "labels": torch.tensor(0)},
]


def test_the_longest_sample_decides() -> None:
    batch = pad_batch(SAMPLES)
    expected = {
        "input_ids": torch.tensor([[2, 7, 3], [2, 3, 0]]),
        "labels": torch.tensor([1, 0]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert batch[name].dtype == torch.int64
        assert torch.equal(batch[name], values), name


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (2, 4), (3, 3), (8, 8)])
def test_the_length_is_a_multiple(multiple: int, length: int) -> None:
    batch = pad_batch(SAMPLES, multiple)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, length)
    assert batch["attention_mask"].sum(1).tolist() == [3, 2]
    assert not batch["input_ids"][:, 3:].any()
