"""Generated sequences: what a frame holds, that nothing depends on the run's seed, and batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from mpframe.core.errors import ConfigError
from mpframe.data import Loader
from mpframe.workloads.speech import collate, phonemes

SMALL: dict[str, Any] = {"train": 20, "val": 5, "test": 6}


def test_every_label_is_heard_in_its_order_with_silence_between() -> None:
    task = phonemes(**SMALL, noise=0.0, max_labels=12)
    for index in range(20):
        frames, labels = task.train[index]
        sounds = frames.abs().sum(dim=1) > 0
        begins = [
            now for (before, now) in pairwise([False, *sounds.tolist()]) if now and not before
        ]
        assert len(begins) == len(labels)
        assert 4 * len(labels) <= len(frames) <= 12 * len(labels)


def test_a_label_has_one_spectrum_and_labels_differ() -> None:
    task = phonemes(train=100, val=1, test=1, noise=0.0, max_labels=1)
    shapes: dict[int, set[tuple[float, ...]]] = {}
    for frames, labels in map(task.train.__getitem__, range(100)):
        loudest = frames[frames.sum(dim=1).argmax()]
        shape = (loudest / loudest.max()).mul(100).round().tolist()
        shapes.setdefault(int(labels[0]), set()).add(tuple(shape))
    assert len(shapes) == 16
    assert all(len(own) == 1 for own in shapes.values())
    assert len(set.union(*shapes.values())) == 16


def test_the_noise_has_its_deviation() -> None:
    plain, noisy = (phonemes(**SMALL, noise=noise).train for noise in (0.0, 0.5))
    noise = torch.cat([noisy[index][0] - plain[index][0] for index in range(20)])
    # Of n even numbers the deviation is off by about sigma / sqrt(5 n / 2); allow ten times that.
    off = 0.5 * 10 / (2.5 * noise.numel()) ** 0.5
    assert abs(noise.std().item() - 0.5) < off
    assert abs(noise.mean().item()) < 10 * 0.5 / noise.numel() ** 0.5


def test_sequences_are_a_function_of_data_seed_part_and_index() -> None:
    first, again, other = (phonemes(**SMALL, data_seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, first.train[7], again.train[7]))
    assert not torch.equal(first.train[7][0], other.train[7][0])
    assert first.test is not None
    parts = [part[7 % 5][0] for part in (first.train, first.val, first.test)]
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(parts))
    assert (len(first.train), len(first.val), len(first.test)) == (20, 5, 6)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="20: there are 20 sequences"):
        first.train[20]


def test_a_longer_part_begins_with_the_shorter_one() -> None:
    short, long = phonemes(**SMALL).train, phonemes(**{**SMALL, "train": 40}).train
    assert torch.equal(short[19][0], long[19][0])


def test_batches_are_padded_and_the_lengths_stay_on_the_host() -> None:
    samples = [(torch.ones(2, 3), torch.tensor([4])), (torch.ones(1, 3), torch.tensor([5, 6]))]
    batch = collate(samples)
    assert batch["inputs"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [0.0] * 3]]
    assert batch["targets"].tolist() == [[4, 0], [5, 6]]
    assert (batch["input_lengths"], batch["target_lengths"]) == ([2, 1], [1, 2])


def test_the_loader_takes_them() -> None:
    task = phonemes(**SMALL)
    batches = list(Loader(task.train, 8, shuffle=True, collate=task.collate).epoch(0))
    assert [len(batch["inputs"]) for batch in batches] == [8, 8, 4]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"train": 0}, r"dataset\.train=0: must be a whole number >= 1"),
        ({"classes": 1}, r"dataset\.classes=1: must be a whole number >= 2"),
        ({"features": 0.5}, r"dataset\.features=0\.5: must be a whole number >= 1"),
        ({"max_labels": 0}, r"dataset\.max_labels=0: must be a whole number >= 1"),
        ({"data_seed": -1}, r"dataset\.data_seed=-1: must be a whole number >= 0"),
        ({"noise": -1.0}, r"dataset\.noise=-1\.0: must be a number >= 0"),
        ({"noise": float("nan")}, r"dataset\.noise=nan: must be a number >= 0"),
    ],
)
def test_options_out_of_range(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        phonemes(**given)
