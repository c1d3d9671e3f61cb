"""Whole-batch images: right pixels, right scale, augmentation by (seed, epoch, index) alone."""

import json
import math
import re
from typing import Any

import pytest
import torch

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import ArrayImages, Normalize, classification

PLAIN = Normalize((0.0, 0.0), (1.0, 1.0))


def make(augment: str = "none", dtype: torch.dtype = torch.uint8, count: int = 40) -> ArrayImages:
    images = torch.randint(0, 256, (count, 2, 8, 8), generator=torch.Generator().manual_seed(0))
    stored = images.to(torch.uint8) if dtype == torch.uint8 else (images / 255).to(dtype)
    return ArrayImages(stored, torch.arange(count) % 3, PLAIN, augment)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalize_takes_bytes_and_fractions_alike(dtype: torch.dtype) -> None:
    data = make(dtype=dtype)
    normalize = Normalize((0.25, 0.5), (0.5, 2.0))
    inputs = normalize(data.images)
    fractions = make(dtype=torch.float64).images
    expected = torch.stack([(fractions[:, 0] - 0.25) / 0.5, (fractions[:, 1] - 0.5) / 2.0], dim=1)
    assert inputs.dtype == torch.float32
    # Three float32 roundings of values below 2: each at most 2^-24 relative, taken as 4e-7.
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=4e-7)


def by_hand(raw: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """What a stranger makes of raw images by the description alone."""
    low, high = how["value_range"]
    mean, std = (torch.tensor(how[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return ((raw.float() - low) / (high - low) - mean) / std


def test_a_stranger_prepares_images_by_the_description() -> None:
    data = make(count=5)
    normalize = Normalize((0.25, 0.5), (0.5, 2.0))
    how = json.loads(json.dumps(normalize.described(8)))
    # As above, and the division by 255 rounds once more.
    torch.testing.assert_close(by_hand(data.images, how), normalize(data.images), rtol=0, atol=6e-7)
    assert (how["size"], how["layout"], how["resize"]) == ([8, 8], "NCHW", None)
    assert how["channel_order"] == "grey"
    assert Normalize((0.5,) * 3, (1.0,) * 3).described(8)["channel_order"] == "RGB"


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"class_names": "cat"}, "the class_names of its Task are a str; give a list of strings"),
        ({"class_names": [0, 1]}, "the class_names of its Task are a list of an int, an int; give"),
        ({"preprocessing": {"mean": torch.ones(1)}}, "of its Task cannot be written as JSON (Obj"),
        ({"preprocessing": {"mean": math.nan}}, "of its Task cannot be written as JSON (Out of"),
    ],
)
def test_a_task_refuses_what_no_export_can_carry(own: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=re.escape(text)):
        classification(make(), make(), **own)


def test_measured_statistics_bring_mean_0_and_variance_1() -> None:
    images = make(count=500).images
    normalized = Normalize.measured(images)(images).double()
    std, mean = torch.std_mean(normalized, dim=(0, 2, 3), correction=0)
    # 32,000 float32 values: the error of their mean is far below one rounding of the largest, 2.
    torch.testing.assert_close(mean, torch.zeros(2).double(), rtol=0, atol=2.4e-7)
    torch.testing.assert_close(std, torch.ones(2).double(), rtol=0, atol=1e-6)


def test_a_constant_channel_is_not_divided_by_zero() -> None:
    images = torch.full((3, 1, 4, 4), 51, dtype=torch.uint8)
    normalize = Normalize.measured(images)
    assert normalize.std == (1.0,)
    assert torch.isfinite(normalize(images)).all()


def test_many_images_are_measured_by_evenly_spaced_ones() -> None:
    images = torch.zeros(4001, 1, 1, 1)
    images[::3] = 1.0  # 4001 images: every third one is looked at, and only those are lit.
    assert Normalize.measured(images).mean == (1.0,)


def test_fetch_batch_gives_samples_in_the_order_asked_for() -> None:
    data = make()
    inputs, targets = data.fetch_batch([7, 3, 3, 39])
    assert torch.equal(inputs, PLAIN(data.images[[7, 3, 3, 39]]))
    assert torch.equal(targets, torch.tensor([1, 0, 0, 0]))
    assert targets.dtype == torch.int64


def test_one_sample_is_its_row_of_a_batch() -> None:
    data = make("crop_flip")
    data.set_epoch(5, 6)
    inputs, targets = data.fetch_batch([4, 8])
    assert torch.equal(data[8][0], inputs[1])
    assert data[8][1] == targets[1]
    assert torch.equal(data[-1][0], data[39][0])
    with pytest.raises(IndexError):
        data[40]


@pytest.mark.parametrize("name", ["crop", "crop_flip"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(name: str) -> None:
    data = make(name)
    everything = list(range(40))

    def images(seed: int, epoch: int, indices: list[int]) -> torch.Tensor:
        data.set_epoch(seed, epoch)
        return data.fetch_batch(indices)[0]

    whole = images(1, 2, everything)
    assert torch.equal(images(1, 2, [5, 30, 5]), whole[[5, 30, 5]])
    assert torch.equal(images(1, 2, everything[::-1]), whole.flip(0))
    assert not torch.equal(images(1, 3, everything), whole)
    assert not torch.equal(images(2, 2, everything), whole)


def test_augmentation_changes_no_stored_image() -> None:
    data = make("crop_flip", torch.float32)
    before = data.images.clone()
    data.fetch_batch(range(40))
    assert torch.equal(data.images, before)


def test_errors() -> None:
    images = torch.zeros(3, 1, 4, 4)
    with pytest.raises(DataError, match=r"^dataset: 3 images but 2 targets; give one for each$"):
        ArrayImages(images, torch.zeros(2), PLAIN)
    with pytest.raises(ConfigError, match=r"^dataset.augment=flips: allowed are none, crop"):
        ArrayImages(images, torch.zeros(3), PLAIN, "flips")


def test_statistics_may_be_lists_and_pixels_of_two_kinds_take_turns() -> None:
    normalize = Normalize([0.5], [0.25])  # type: ignore[arg-type]
    bytes_, floats = torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.tensor([[[[0.0, 1.0]]]])
    for _ in range(2):  # What is kept of one kind must not serve the other.
        assert normalize(bytes_).tolist() == normalize(floats).tolist() == [[[[-2.0, 2.0]]]]
