"""Kept samples: made once, as long as they fit, and nobody can change them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.core.tree import tensors_in
from mpframe.data import Task
from mpframe.data.samples import Generated
from mpframe.workloads.detection import scenes
from mpframe.workloads.segmentation.data import shapes
from mpframe.workloads.speech import phonemes

SMALL: dict[Any, dict[str, Any]] = {
    shapes: {"image_size": 16, "images": 10},
    scenes: {"image_size": 16, "train": 10, "val": 1, "test": 1},
    phonemes: {"train": 10, "val": 1, "test": 1},
}


class Made(Generated):
    """Samples of 12 bytes, with a note of each that was made."""

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(4, (0,), 0.0, cache_bytes)
        self.made: list[int] = []

    def draw(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.made.append(index)
        return torch.full((2,), float(index)), {"label": torch.tensor(index, dtype=torch.int32)}


@pytest.mark.parametrize(("cache_bytes", "again"), [(48, []), (47, [3]), (11, [0, 1, 2, 3])])
def test_samples_are_made_once_as_long_as_they_fit(cache_bytes: int, again: list[int]) -> None:
    kept = Made(cache_bytes)
    assert len(kept) == 4
    for epoch in (0, 1):
        for index in range(4):
            values, rest = kept[index]
            assert torch.equal(values, torch.full((2,), float(index)))
            assert int(rest["label"]) == index
        assert kept.made == list(range(4)) + again * epoch


def test_writing_into_a_sample_changes_no_later_one() -> None:
    kept = Made(48)
    for _ in range(2):
        values, rest = kept[2]
        assert (values.tolist(), int(rest["label"])) == ([2.0, 2.0], 2)
        values.zero_()
        rest["label"].zero_()


@pytest.mark.parametrize("make", SMALL)
def test_generated_samples_are_the_same_kept_or_not(make: Any) -> None:
    tasks: list[Task] = [make(**SMALL[make], cache_bytes=size) for size in (2**20, 0)]
    for _ in range(2):
        for index in (3, 0):
            kept, fresh = (list(tensors_in(task.train[index])) for task in tasks)
            assert len(kept) >= 2
            assert all(map(torch.equal, kept, fresh))


@pytest.mark.parametrize("make", SMALL)
def test_cache_bytes_out_of_range(make: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make(cache_bytes=-1)
    assert str(error.value) == "dataset.cache_bytes=-1: must be a whole number >= 0"
