"""Random numbers by key, samples that are held out, and samples kept once they are made."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vocabulary import differing

from mpframe.core.tree import tensors_in
from mpframe.data.samples import Generated, _mix64, draw_uniforms, hash_key, hold_out
from mpframe.workloads.detection import scenes
from mpframe.workloads.segmentation.data import shapes
from mpframe.workloads.speech import phonemes

GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def reference_mix64(z: int) -> int:
    """mix64 in Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_stream_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its reference implementation prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _mix64(np.arange(1, 4, dtype=np.uint64) * np.uint64(GAMMA)).tolist() == published


@pytest.mark.parametrize("words", [(0,), (2**63 - 1, 7, 3), (-5, 2**64 - 1, 11)])
def test_state_folds_the_words_and_draws_follow_it(words: tuple[int, ...]) -> None:
    state = 0
    for word in words:
        state = reference_mix64((state + word + GAMMA) & MASK)
    assert hash_key(*words).tolist() == [state]
    bits = [reference_mix64((state + j * GAMMA) & MASK) >> 11 for j in (1, 2, 3)]
    assert draw_uniforms(3, *words).tolist() == [[b * 2.0**-53 for b in bits]]
    assert np.array_equal(draw_uniforms(2, *words), draw_uniforms(6, *words)[:, :2])


# The split of 100 samples in four classes: pinned, for a changed split would move every result.
HELD_OF_100 = [3, 10, 17, 23, 42, 45, 47, 48, 52, 58, 60, 61, 62, 63, 71, 76, 77, 81, 84, 86]


def test_the_split_never_changes_and_parts_share_what_is_held_out() -> None:
    targets = torch.arange(100) % 4
    train, held = hold_out(targets, one_in=5)
    assert sorted(train.tolist() + HELD_OF_100) == list(range(100))
    assert held.tolist() == HELD_OF_100
    shared, first, second = hold_out(targets, one_in=5, parts=2)
    assert torch.equal(shared, train)
    assert (first.diff() > 0).all()
    assert sorted(first.tolist() + second.tolist()) == HELD_OF_100
    assert targets[first].bincount().tolist() == [3, 2, 3, 2]


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
    for epoch in (0, 1):
        for index in range(4):
            values, rest = kept[index]
            assert (values.tolist(), int(rest["label"])) == ([float(index)] * 2, index)
            values.zero_()  # It changes no later one.
            rest["label"].zero_()
        assert kept.made == list(range(4)) + again * epoch
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"{index}: there are 4 samples"):
            kept[index]


SMALL: dict[Any, dict[str, Any]] = {
    shapes: {"image_size": 16, "images": 10},
    scenes: {"image_size": 16, "train": 10, "val": 1, "test": 1},
    phonemes: {"train": 10, "val": 1, "test": 1},
}


@pytest.mark.parametrize("make", SMALL)
def test_generated_samples_are_a_function_of_seed_part_and_index_kept_or_not(make: Any) -> None:
    """A longer part begins with the shorter one."""
    more = {"train" if "train" in SMALL[make] else "images": 20}
    kept = make(**SMALL[make], cache_bytes=2**20)
    fresh = make(**{**SMALL[make], **more}, cache_bytes=0)
    for index in (3, 0, 3):
        assert not differing(kept.train[index], fresh.train[index])
    firsts = [next(tensors_in(part[0])) for part in (kept.train, kept.val, kept.test)]
    if "train" in more:
        firsts.append(next(tensors_in(make(**SMALL[make], data_seed=1).train[0])))
    assert all(a.shape != b.shape or not torch.equal(a, b) for a, b in combinations(firsts, 2))
    assert [len(part) for part in (kept.train, kept.val, kept.test)] == [10, 1, 1]
