"""A class for each pixel: generated shapes, and folders of photographs and masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import refused
from PIL import Image

from mpframe.core.errors import ConfigError, DataError
from mpframe.data.fetching import at_epoch
from mpframe.data.samples import draw_uniforms
from mpframe.workloads.segmentation.data import _starts, mask_folder, shapes


def test_shapes_by_hand() -> None:
    """With one shape at most."""
    side, channels = 12, 2
    task: Any = shapes(image_size=side, channels=channels, images=12, most_shapes=1)
    y, x = np.mgrid[:side, :side] + 0.5
    seen = set()
    for index in range(12):
        image, targets = task.train[index]
        (u,) = draw_uniforms(channels + 5 + channels + channels * side**2, 0, index)
        there, kind, down, right, size = u[channels : channels + 5]
        radius, number = (0.1 + 0.15 * size) * side, 1 + int(3 * kind)
        dy, dx = y - down * side, x - right * side
        reach = {1: np.inf, 2: radius, 3: (dy + radius) / 2}[number]
        inside = dy**2 + dx**2 < radius**2 if number == 1 else abs(dy) < radius
        inside = inside & (abs(dx) < reach) & (there < 0.75)
        assert np.array_equal(targets.numpy(), number * inside)
        back, front = u[:channels], u[channels + 5 : 2 * channels + 5]
        colour = np.where(inside, front[:, None, None], back[:, None, None])
        noise = u[2 * channels + 5 :].reshape(channels, side, side)
        expected = 2 * (colour + 0.15 * (2 * noise - 1)) - 1
        assert np.array_equal(image.numpy(), expected.astype(np.float32))
        seen |= set(targets.unique().tolist())
    assert seen == {0, 1, 2, 3}


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


def raw(task: Any, images: torch.Tensor) -> torch.Tensor:
    """The pixels 0..255 before they were normalised."""
    mean, std = (torch.tensor(task.preprocessing[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return ((images * std + mean) * 255).round().long()


def folder(root: Path, **options: Any) -> Any:
    return mask_folder(str(root), **{"image_size": 8, "crops_per_image": 5, **options})


@pytest.mark.parametrize(("flip", "cache_bytes"), [(True, 0), (False, 2**20)])
def test_random_crops_and_their_classes(tree: Path, flip: bool, cache_bytes: int) -> None:
    task = folder(tree, flip=flip, cache_bytes=cache_bytes)
    assert len(task.train) == 10
    images, targets = at_epoch(task.train, 3, 2).fetch_batch(range(10))
    pixels = raw(task, images)
    assert torch.equal(pixels[:, 0] % 2, targets)
    for index in range(10):
        whole = np.asarray(Image.open(tree / "train" / "images" / f"{'ab'[index // 5]}.png"))
        (u,) = draw_uniforms(3, 3, 2, index)  # So the epoch, 2, decides.
        top, left = int(u[0] * (whole.shape[0] - 7)), int(u[1] * (whole.shape[1] - 7))
        crop = torch.tensor(whole[top : top + 8, left : left + 8]).permute(2, 0, 1).long()
        assert torch.equal(pixels[index], crop.flip(-1) if flip and u[2] < 0.5 else crop)


def test_tiles_cover_every_pixel(tree: Path) -> None:
    task = folder(tree)
    assert len(task.val) == 2 * 2 + 2
    images, targets = task.val.fetch_batch(range(6))
    pixels = raw(task, images)
    assert torch.equal(pixels[:, 0] % 2, targets)
    wide = np.asarray(Image.open(tree / "val" / "images" / "b.png"))
    both = torch.cat([pixels[4], pixels[5]], dim=-1)
    assert torch.equal(both, torch.tensor(wide).permute(2, 0, 1).long())
    path = tree / "val" / "masks" / "b.png"
    numbers = np.asarray(Image.open(path))
    for mode, white in (("P", 1), ("1", 255)):  # A mask may have a palette or one bit.
        save(path, numbers * white, mode)
        tiles = folder(tree).val.fetch_batch([4, 5])[1]
        assert torch.equal(torch.cat([*tiles], dim=-1), torch.tensor(numbers).long())
    starts = {8: [0], 9: [0, 1], 16: [0, 8], 17: [0, 4, 9], 24: [0, 8, 16]}
    assert {length: _starts(length, 8) for length in starts} == starts  # few and even
    assert folder(tree, channels=1).train[0][0].shape == (1, 8, 8)  # grey
    (tree / "test").rename(tree / "other")
    assert folder(tree).test is None


@pytest.mark.parametrize(("place", "pixels", "text"), [
    ("masks/b.png", np.full((8, 16), 2), "masks/b.png: holds 2, and dataset.classes=2 allows 0 t"),
    ("masks/b.png", np.zeros((8, 15)), "masks/b.png: is 15 x 8 pixels and VAL/images/b.png is 16 "),
    ("masks/b.png", np.zeros((8, 16, 3)), "masks/b.png: not a readable PNG or BMP (its pixels are"),
    ("masks/b.png", None, ": b is in images/ or in masks/ only; a photograph and its mask have"),
    ("masks/b.jpg", np.zeros((8, 16)), "masks/b.jpg: not a readable PNG or BMP (cannot"),
    ("images/b.bmp", np.zeros((12, 9, 3)), "images/b.bmp: another file has the same name; rem"),
])  # fmt: skip
def test_masks_that_do_not_fit(tree: Path, place: str, pixels: Any, text: str) -> None:
    val = tree / "val"
    if place.startswith("masks"):
        (val / "masks" / "b.png").unlink()
    if pixels is not None:
        save(val / place, pixels)
    text = f"{val}{text if text[0] == ':' else '/' + text}".replace("VAL", str(val))
    assert refused(DataError, folder, tree).startswith(text)


def test_trees_and_options_that_do_not_fit(tree: Path) -> None:
    assert refused(ConfigError, folder, tree, image_size=9) == (
        f"dataset.image_size=9: {tree}/train/images/b.png is 16 x 8 pixels; use "
        "dataset.image_size=8 or less"
    )
    for word in ["channels=2", "classes=1", "image_size=0", "crops_per_image=0", "cache_bytes=-1"]:
        option, value = word.split("=")
        text = refused(ConfigError, folder, tree, **{option: int(value)})
        assert text.startswith(f"dataset.{word}: ")
    (tree / "val").rename(tree / "other")
    assert refused(DataError, folder, tree) == (
        f"dataset.root={tree}: needs the folders train/ and val/, with images/ and masks/ in each; "
        "set dataset.root to such a tree"
    )
