"""Random numbers by key, samples kept once they are made, and images in whole batches."""

import json
import math
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, refused
from torch import Tensor
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.tree import tensors_in
from mpframe.data import ArrayImages, Normalize, Task, classification, digits
from mpframe.data.images import mirror, shift_crop
from mpframe.data.samples import Generated, _mix64, draw_uniforms, hash_key, hold_out
from mpframe.workloads.detection import scenes
from mpframe.workloads.segmentation.data import shapes
from mpframe.workloads.speech import phonemes


@pytest.mark.parametrize("words", [(0,), (2**63 - 1, 7, 3), (-5, 2**64 - 1, 11)])
def test_the_stream_is_splitmix64_from_a_state_that_folds_the_words(words: tuple[int, ...]) -> None:
    gamma, state = 0x9E3779B97F4A7C15, 0

    def mix64(*z: int) -> Any:
        return _mix64(np.array([own % 2**64 for own in z], dtype=np.uint64)).tolist()

    # The first outputs of SplitMix64 seeded with 0, as its reference implementation prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(*(n * gamma for n in (1, 2, 3))) == published
    for word in words:
        (state,) = mix64(state + word + gamma)
    assert hash_key(*words).tolist() == [state]
    bits = mix64(*(state + n * gamma for n in (1, 2, 3)))
    assert draw_uniforms(3, *words).tolist() == [[(b >> 11) * 2.0**-53 for b in bits]]
    assert np.array_equal(draw_uniforms(2, *words), draw_uniforms(6, *words)[:, :2])


def test_the_split_never_changes_and_parts_share_what_is_held_out() -> None:
    targets = torch.arange(100) % 4
    # Pinned, for a changed split would move every result.
    pinned = [3, 10, 17, 23, 42, 45, 47, 48, 52, 58, 60, 61, 62, 63, 71, 76, 77, 81, 84, 86]
    train, held = hold_out(targets, one_in=5)
    assert sorted(train.tolist() + pinned) == list(range(100))
    assert held.tolist() == pinned
    shared, first, second = hold_out(targets, one_in=5, parts=2)
    assert torch.equal(shared, train)
    assert (first.diff() > 0).all()
    assert sorted(first.tolist() + second.tolist()) == pinned
    assert targets[first].bincount().tolist() == [3, 2, 3, 2]


class Made(Generated):
    """Samples of 12 bytes, with a note of each that was made."""

    def draw(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.made = [*getattr(self, "made", []), index]
        return torch.full((2,), float(index)), {"label": torch.tensor(index, dtype=torch.int32)}


@pytest.mark.parametrize(("cache_bytes", "again"), [(48, []), (47, [3]), (11, [0, 1, 2, 3])])
def test_samples_are_made_once_as_long_as_they_fit(cache_bytes: int, again: list[int]) -> None:
    kept = Made(4, (0,), 0.0, cache_bytes)
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


@pytest.mark.parametrize("make", [shapes, scenes, phonemes])
def test_made_samples_depend_on_seed_part_and_index(make: Any) -> None:
    """A longer part begins with the shorter one."""
    longer = "images" if make is shapes else "train"
    counts = {"images": 10} if make is shapes else {"train": 10, "val": 1, "test": 1}
    kept = make(**counts, cache_bytes=2**20)
    fresh = make(**{**counts, longer: 20}, cache_bytes=0)
    for index in (3, 0, 3):
        assert not differing(kept.train[index], fresh.train[index])
    parts = [kept.train, kept.val, kept.test]
    assert [len(part) for part in parts] == [10, 1, 1]
    others = [] if make is shapes else [make(**counts, data_seed=1).train]
    firsts = [next(tensors_in(part[0])) for part in (*parts, *others)]
    assert all(a.shape != b.shape or not torch.equal(a, b) for a, b in combinations(firsts, 2))


PLAIN = Normalize((0.0, 0.0), (1.0, 1.0))


def make(augment: str = "none", dtype: torch.dtype = torch.uint8, count: int = 40) -> ArrayImages:
    images = torch.randint(0, 256, (count, 2, 8, 8), generator=torch.Generator().manual_seed(0))
    stored = images.to(torch.uint8) if dtype == torch.uint8 else (images / 255).to(dtype)
    return ArrayImages(stored, torch.arange(count) % 3, PLAIN, augment)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalize_takes_bytes_and_fractions_alike(dtype: torch.dtype) -> None:
    inputs = Normalize((0.25, 0.5), (0.5, 2.0))(make(dtype=dtype).images)
    fractions = make(dtype=torch.float64).images
    expected = torch.stack([(fractions[:, 0] - 0.25) / 0.5, (fractions[:, 1] - 0.5) / 2.0], dim=1)
    assert inputs.dtype == torch.float32
    # Three float32 roundings of values below 2: each at most 2^-24 relative, taken as 4e-7.
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=4e-7)
    normalize = Normalize([0.5], [0.25])  # Statistics may be lists.
    for own in (dtype, torch.uint8) * 2:  # What is kept of one kind must not serve the other.
        images = torch.tensor([[[[0, 255 if own == torch.uint8 else 1]]]], dtype=own)
        assert normalize(images).tolist() == [[[[-2.0, 2.0]]]]


def test_statistics_are_measured() -> None:
    images = make(count=500).images
    std, mean = torch.std_mean(images.double() / 255, dim=(0, 2, 3), correction=0)
    measured = Normalize.measured(images)
    assert [*measured.mean, *measured.std] == pytest.approx([*mean.tolist(), *std.tolist()])
    # A constant channel is not divided by zero.
    assert Normalize.measured(torch.full((3, 1, 4, 4), 51, dtype=torch.uint8)).std == (1.0,)
    images = torch.zeros(4001, 1, 1, 1)
    images[::3] = 1.0  # Of so many every third one is looked at, and only those are lit.
    assert Normalize.measured(images).mean == (1.0,)
    # A run can be evaluated with another number of threads than it was trained with.
    images, threads = make(dtype=torch.bfloat16, count=2000).images, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = Normalize.measured(images)
        torch.set_num_threads(7)
        assert Normalize.measured(images) == alone
    finally:
        torch.set_num_threads(threads)


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    data = make("crop_flip", torch.float32)
    everything, before = list(range(40)), data.images.clone()

    def images(seed: int, epoch: int, indices: list[int]) -> Tensor:
        data.set_epoch(seed, epoch)
        return data.fetch_batch(indices)[0]

    whole = images(1, 2, everything)
    inputs, targets = data.fetch_batch([7, 3, 3, 39])
    assert torch.equal(inputs, whole[[7, 3, 3, 39]])
    assert torch.equal(targets, torch.tensor([1, 0, 0, 0]))
    assert torch.equal(torch.stack([data[3][0], data[-1][0]]), whole[[3, 39]])
    with pytest.raises(IndexError):
        data[40]
    assert torch.equal(images(1, 2, everything[::-1]), whole.flip(0))
    assert not any(torch.equal(images(*key, everything), whole) for key in ((1, 3), (2, 2)))
    assert torch.equal(data.images, before)
    assert torch.equal(make().fetch_batch([7, 3])[0], PLAIN(make().images[[7, 3]]))


@pytest.mark.parametrize(("dtype", "padding"), [(torch.uint8, 1), (torch.float32, 3)])
def test_a_crop_is_a_window_of_the_padded_image_and_half_are_mirrored(
    dtype: Any, padding: int
) -> None:
    images = make(dtype=dtype, count=6).images
    flipped = mirror(images[:3], torch.tensor([0.49, 0.5, 0.0]))
    assert torch.equal(flipped, torch.stack([images[0].flip(-1), images[1], images[2].flip(-1)]))
    uniforms = torch.from_numpy(draw_uniforms(2, range(6)))
    for row, end in enumerate((0.5, 0.0, 1 - 2.0**-53)):
        uniforms[row] = end
    cropped = shift_crop(images, padding, uniforms)
    assert cropped.dtype == dtype
    assert torch.equal(cropped[0], images[0])  # The middle place changes nothing.
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    for image, result, (u, v) in zip(padded, cropped, uniforms.tolist(), strict=True):
        top, left = int(u * (2 * padding + 1)), int(v * (2 * padding + 1))
        assert torch.equal(result, image[:, top : top + 8, left : left + 8])


THREE = torch.zeros(3, 1, 4, 4)


@pytest.mark.parametrize(("error", "call", "text"), [
    (DataError, lambda: ArrayImages(THREE, torch.zeros(2), PLAIN),
     "dataset: 3 images but 2 targets; give one for each"),
    (ConfigError, lambda: ArrayImages(THREE, torch.zeros(3), PLAIN, "flips"),
     "dataset.augment=flips: must be one of none, crop, crop_flip"),
    (DataError, lambda: classification(make(), make(), class_names=[0, 1]),
     "dataset: the class_names of its Task is a list of an int, an int; it must be a list of"),
    (TypeError, lambda: classification(make(), make(), preprocessing={"mean": THREE}), "Tensor is"),
    (ValueError, lambda: classification(make(), make(), preprocessing={"mean": math.nan}), "JSON"),
    (DataError, lambda: Task(make(), make(), loss=torch.nn.CrossEntropyLoss),  # type: ignore[arg-type]
     "dataset: the loss of its Task is a class; make it CrossEntropyLoss()"),
    (ConfigError, lambda: digits(root="a"), "dataset.root=a: the digits come with scikit-lear"),
    (ConfigError, lambda: digits(classes=11), "classes=11: digits has 10; set dataset.classes"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(error: type[Exception], call: Any, text: str) -> None:
    assert text in refused(error, call)


def test_every_digit_is_in_one_part_and_a_stranger_prepares_it_by_the_description(
    monkeypatch: Patch,
) -> None:
    file = Path(str(find_spec("sklearn").origin)).parent / "datasets/data/digits.csv.gz"
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # Its import, slow, is an error now.
    task: Any = digits(augment="crop")
    parts = [task.train, task.val, task.test]
    assert [len(part) for part in parts] == [1437, 180, 180]
    assert [part.augment for part in parts] == ["crop", "none", "none"]
    assert [task.train.unaugmented().augment, task.train.augment] == ["none", "crop"]
    stored = torch.cat([part.images for part in parts]).flatten(1)
    published = torch.from_numpy(np.loadtxt(file, delimiter=",")[:, :-1]).float() / 16
    assert sorted(stored.tolist()) == sorted(published.tolist())
    train, val, test = (part.targets.bincount(minlength=10) for part in parts)
    # Counting off in tens over all classes in a row: each class is off by less than one.
    for held in (val, test):
        assert ((held - (train + val + test) / 10).abs() < 1).all()
    how = json.loads(json.dumps(task.preprocessing))
    told = {"size": [8, 8], "layout": "NCHW", "resize": None, "channel_order": "grey"}
    assert how.items() >= told.items()
    low, high = how["value_range"]  # of the published numbers, 0 to 16
    inputs = ((task.val.images * 16 - low) / (high - low) - how["mean"][0]) / how["std"][0]
    # Three roundings of values below 4, where half a unit in the last place is 2^-23.
    torch.testing.assert_close(task.val.normalize(task.val.images), inputs, rtol=0, atol=3 * 2**-23)
    assert task.val.normalize == Normalize.measured(task.train.images)
    assert task.class_names == [str(digit) for digit in range(10)]
