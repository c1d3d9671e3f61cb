"""Crops and flips: the right pixels, at places that are spread evenly."""

import pytest
import torch
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.data.images import (
    AUGMENTATIONS,
    DRAWS,
    augment,
    mirror,
    require_augmentation,
    shift_crop,
)
from mpframe.data.samples import draw_uniforms


def some_images(dtype: torch.dtype, count: int = 6) -> Tensor:
    return (torch.arange(count * 2 * 8 * 8).view(count, 2, 8, 8) % 251).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [1, 3])
def test_crop_is_a_window_of_the_padded_image(dtype: torch.dtype, padding: int) -> None:
    images = some_images(dtype)
    uniforms = torch.from_numpy(draw_uniforms(2, range(len(images))))
    cropped = shift_crop(images, padding, uniforms)
    assert cropped.dtype == dtype
    for image, result, (u, v) in zip(images, cropped, uniforms.tolist(), strict=True):
        top, left = int(u * (2 * padding + 1)), int(v * (2 * padding + 1))
        padded = torch.zeros(2, 8 + 2 * padding, 8 + 2 * padding, dtype=dtype)
        padded[:, padding : padding + 8, padding : padding + 8] = image
        assert torch.equal(result, padded[:, top : top + 8, left : left + 8])


def test_the_middle_place_changes_nothing_and_the_ends_shift_fully() -> None:
    images = some_images(torch.float32, count=3)
    ends = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1 - 2.0**-53, 1 - 2.0**-53]], dtype=torch.float64)
    kept, down, up = shift_crop(images, 1, ends)
    assert torch.equal(kept, images[0])
    assert torch.equal(down[:, 1:, 1:], images[1][:, :-1, :-1])
    assert torch.equal(down[:, 0], torch.zeros(2, 8))
    assert torch.equal(up[:, :-1, :-1], images[2][:, 1:, 1:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_mirror_flips_below_one_half(dtype: torch.dtype) -> None:
    images = some_images(dtype, count=3)
    flipped = mirror(images, torch.tensor([0.49, 0.5, 0.0]))
    assert torch.equal(flipped[0], images[0].flip(-1))
    assert torch.equal(flipped[1], images[1])
    assert torch.equal(flipped[2], images[2].flip(-1))


def test_places_and_flips_are_evenly_spread() -> None:
    # One lit pixel in the middle shows where each image went.
    count = 9000
    images = torch.zeros(count, 1, 8, 8)
    images[:, :, 4, 3] = 1.0
    uniforms = torch.from_numpy(draw_uniforms(DRAWS, 0, 0, range(count)))
    places = augment(images, "crop_flip", uniforms).flatten(1).argmax(dim=1)
    counts = places.bincount(minlength=64)
    # Columns 2..4 or, mirrored, 3..5; rows 3..5. Expected shares per row 1/3, per column
    # 1/6, 1/3, 1/3, 1/6; the count of a cell has a deviation below sqrt(1000) = 32; five of them.
    expected = torch.zeros(8, 8)
    expected[3:6, 2:6] = torch.tensor([1.0, 2.0, 2.0, 1.0]) / 18 * count
    assert (counts - expected.flatten()).abs().max() < 5 * 32


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_shape_dtype_and_input_are_kept(name: str) -> None:
    images = some_images(torch.uint8)
    before = images.clone()
    result = augment(images, name, torch.from_numpy(draw_uniforms(DRAWS, range(len(images)))))
    assert result.shape == images.shape
    assert result.dtype == images.dtype
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("name", "hint"), [("flip", "nearest: crop_flip"), ("cropp", "nearest: crop"), ("xyz", "flip")]
)
def test_unknown_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_augmentation(name)
    text = str(caught.value)
    assert text.startswith(f"dataset.augment={name}: allowed are none, crop, crop_flip")
    assert hint in text
    assert "\n" not in text
