"""A class for each pixel: generated shapes, and folders of photographs and masks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Task
from mpframe.data.fetching import at_epoch
from mpframe.data.samples import draw_uniforms
from mpframe.workloads.segmentation.data import _starts, mask_folder, shapes


def refused(call: Callable[[], Any], error: type[Exception] = DataError) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


# shapes


def test_shapes_are_a_function_of_part_and_index() -> None:
    task, again = (shapes(image_size=16, images=20) for _ in range(2))
    parts: Any = (task.train, task.val, task.test)
    assert [len(part) for part in parts] == [20, 2, 2]
    assert all(map(torch.equal, again.train[7], task.train[7]))
    firsts = [part[0][0] for part in parts]
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])


def test_shapes_by_hand() -> None:
    """The first picture with one shape at most, drawn pixel by pixel."""
    side, channels = 12, 2
    task = shapes(image_size=side, channels=channels, images=12, most_shapes=1)
    seen = set()
    for index in range(12):
        image, targets = task.train[index]
        (u,) = draw_uniforms(channels + 5 + channels + channels * side**2, 0, index)
        there, kind, down, right, size = u[channels : channels + 5]
        radius, number = (0.1 + 0.15 * size) * side, 1 + int(3 * kind)
        noise = u[2 * channels + 5 :].reshape(channels, side, side)
        for y in range(side):
            for x in range(side):
                dy, dx = y + 0.5 - down * side, x + 0.5 - right * side
                inside = {
                    1: dy**2 + dx**2 < radius**2,
                    2: abs(dy) < radius and abs(dx) < radius,
                    3: abs(dy) < radius and abs(dx) < (dy + radius) / 2,
                }[number] and there < 0.75
                assert targets[y, x] == (number if inside else 0)
                colour = u[channels + 5 : 2 * channels + 5] if inside else u[:channels]
                expected = 2 * (colour + 0.15 * (2 * noise[:, y, x] - 1)) - 1
                assert np.array_equal(image[:, y, x].numpy(), expected.astype(np.float32))
        seen |= set(targets.unique().tolist())
    assert seen == {0, 1, 2, 3}


def test_shapes_refuse() -> None:
    for option, value in {"image_size": 7, "channels": 0, "most_shapes": 0, "classes": 3}.items():
        text = refused(lambda own={option: value}: shapes(**own), ConfigError)  # type: ignore[misc]
        assert text.startswith(f"dataset.{option}={value}: ")


# folders


def save(path: Path, pixels: Any, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    (image.convert(mode) if mode == "1" else image).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Photographs whose pixels differ, of two sizes; the mask of a pixel is its lowest bit."""
    random = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for name, (height, width) in {"a": (12, 9), "b": (8, 16)}.items():
            pixels = random.integers(0, 256, (height, width, 3))
            save(tmp_path / part / "images" / f"{name}.png", pixels)
            save(tmp_path / part / "masks" / f"{name}.png", pixels[..., 0] % 2)
    return tmp_path


def raw(task: Task, images: torch.Tensor) -> torch.Tensor:
    """The pixels 0..255 before they were normalised."""
    told: Any = task.preprocessing
    mean, std = (torch.tensor(told[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return ((images * std + mean) * 255).round().long()


def folder(root: Path, **options: Any) -> Task:
    return mask_folder(str(root), **{"image_size": 8, "crops_per_image": 5, **options})


@pytest.mark.parametrize(("flip", "cache_bytes"), [(True, 0), (False, 2**20)])
def test_random_crops_and_their_classes(tree: Path, flip: bool, cache_bytes: int) -> None:
    task = folder(tree, flip=flip, cache_bytes=cache_bytes)
    assert len(task.train) == 10  # type: ignore[arg-type]
    view = at_epoch(task.train, 3, 2)
    images, targets = view.fetch_batch(range(10))
    pixels = raw(task, images)
    assert torch.equal(pixels[:, 0] % 2, targets)
    for index in range(10):
        name = "ab"[index // 5]
        whole = np.asarray(Image.open(tree / "train" / "images" / f"{name}.png"))
        (u,) = draw_uniforms(3, 3, 2, index)
        top, left = int(u[0] * (whole.shape[0] - 7)), int(u[1] * (whole.shape[1] - 7))
        crop = torch.tensor(whole[top : top + 8, left : left + 8]).permute(2, 0, 1).long()
        expected = crop.flip(-1) if flip and u[2] < 0.5 else crop
        assert torch.equal(pixels[index], expected)


def test_every_epoch_has_crops_of_its_own(tree: Path) -> None:
    train = folder(tree).train
    crops = [at_epoch(train, 1, epoch).fetch_batch(range(10))[0] for epoch in (0, 0, 1)]
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])


def test_tiles_cover_every_pixel(tree: Path) -> None:
    task = folder(tree)
    assert len(task.val) == 2 * 2 + 2  # type: ignore[arg-type]
    images, targets = task.val.fetch_batch(range(6))  # type: ignore[attr-defined]
    pixels = raw(task, images)
    assert torch.equal(pixels[:, 0] % 2, targets)
    wide = np.asarray(Image.open(tree / "val" / "images" / "b.png"))
    both = torch.cat([pixels[4], pixels[5]], dim=-1)
    assert torch.equal(both, torch.tensor(wide).permute(2, 0, 1).long())
    starts = {8: [0], 9: [0, 1], 16: [0, 8], 17: [0, 4, 9], 24: [0, 8, 16]}
    assert {length: _starts(length, 8) for length in starts} == starts  # few and even
    assert folder(tree, channels=1).train[0][0].shape == (1, 8, 8)  # grey
    (tree / "test").rename(tree / "other")
    assert folder(tree).test is None


@pytest.mark.parametrize("mode", ["P", "1"])
def test_a_mask_may_have_a_palette_or_one_bit(tree: Path, mode: str) -> None:
    path = tree / "val" / "masks" / "b.png"
    numbers = np.asarray(Image.open(path))
    save(path, numbers * (255 if mode == "1" else 1), mode)
    targets = folder(tree).val.fetch_batch([4, 5])[1]  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([*targets], dim=-1), torch.tensor(numbers).long())


def test_masks_that_do_not_fit(tree: Path) -> None:
    image, mask = (tree / "val" / kind / "b.png" for kind in ("images", "masks"))
    save(mask, np.full((8, 16), 2))
    assert refused(lambda: folder(tree)) == (
        f"{mask}: holds 2, and dataset.classes=2 allows 0 to 1; the number of a pixel is its class"
    )
    save(mask, np.zeros((8, 15)))
    assert refused(lambda: folder(tree)) == (
        f"{mask}: is 15 x 8 pixels and {image} is 16 x 8; give both the same size"
    )
    save(mask, np.zeros((8, 16, 3)))
    assert refused(lambda: folder(tree)) == (
        f"{mask}: not a readable PNG or BMP (its pixels are RGB, and not one number of 8 bits "
        "each); replace or remove it"
    )
    mask.unlink()
    assert refused(lambda: folder(tree)) == (
        f"{image}: has no counterpart in {tree}/val/masks; a photograph and its mask have the same "
        "name"
    )
    Image.fromarray(np.zeros((8, 16), dtype=np.uint8)).save(mask.with_suffix(".jpg"))
    jpeg = mask.with_suffix(".jpg")
    assert refused(lambda: folder(tree)).startswith(f"{jpeg}: not a readable PNG or BMP (cannot")


def test_trees_and_options_that_do_not_fit(tree: Path) -> None:
    assert refused(lambda: folder(tree, image_size=9), ConfigError) == (
        f"dataset.image_size=9: {tree}/train/images/b.png is 16 x 8 pixels; use "
        "dataset.image_size=8 or less"
    )
    for option, value in {
        "channels": 2, "classes": 1, "image_size": 0, "crops_per_image": 0, "cache_bytes": -1,
    }.items():  # fmt: skip
        text = refused(lambda own={option: value}: folder(tree, **own), ConfigError)  # type: ignore[misc]
        assert text.startswith(f"dataset.{option}={value}: ")
    save(tree / "val" / "images" / "a.bmp", np.zeros((12, 9, 3)))
    assert "a.png: " in (text := refused(lambda: folder(tree)))
    assert text.endswith("has the same name; remove one of them")
    (tree / "val").rename(tree / "other")
    assert refused(lambda: folder(tree)) == (
        f"dataset.root={tree}: needs the folders train/ and val/, with images/ and masks/ in each; "
        "set dataset.root to such a tree"
    )
