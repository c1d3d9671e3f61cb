"""Image folders made here: right pixels and classes, nothing outside the tree, no odd formats."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.ImageOps
import pytest
import torch
from fixtures import Log, refused
from PIL import Image
from torch import Tensor
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import ArrayImages, Images, Loader, image_folder
from mpframe.data.image_files import FileImages, decode

CLASSES = ("ant", "bee", "cat")


def picture(number: int, side: int = 8) -> np.ndarray:
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (side, side, 3), dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six PNG per class to train on and two to validate, 8 x 8."""
    for split, count in (("train", 6), ("val", 2)):
        for name in CLASSES:
            for number in range(count):
                save(tmp_path / split / name / f"{number}.png", picture(number))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def load(root: Path, **options: Any) -> Any:
    return image_folder(str(root), **{"image_size": 8, "classes": 3, "augment": "none", **options})


def pixels_of(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def raw(part: Images) -> Tensor:
    return part.pixels(torch.arange(len(part)))


@pytest.mark.parametrize("cache_bytes", [(18 + 6) * 3 * 8 * 8, (18 + 6) * 3 * 8 * 8 - 1])
def test_pixels_and_classes_and_what_is_left_out(tree: Path, cache_bytes: int, caplog: Log) -> None:
    """Memory is used up to cache_bytes; decoding late changes nothing."""
    for name in ("y.gif", "z.gif"):
        Image.fromarray(picture(0)).save(tree / "train" / "bee" / name)
    task = load(tree, cache_bytes=cache_bytes, augment="crop_flip")
    assert caplog.messages == [
        f"warning: {tree}/train: left out 3 files that are no .jpg or .jpeg or .png or .webp or "
        ".bmp"
    ]
    assert type(task.train) is type(task.val) is (FileImages if cache_bytes % 2 else ArrayImages)
    expected = torch.stack([pixels_of(picture(n)) for n in range(6)])
    assert torch.equal(raw(task.train), expected.repeat(3, 1, 1, 1))
    assert task.train.targets.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert torch.equal(raw(task.val), expected[:2].repeat(3, 1, 1, 1))
    whole = load(tree, augment="crop_flip").train
    batches = [list(Loader(t, 4, seed=3, shuffle=True).epoch(1)) for t in (task.train, whole)]
    assert not differing(*batches)


def test_without_val_one_training_image_in_ten_validates(tree: Path, caplog: Log) -> None:
    every = load(tree).train
    (tree / "val").rename(tree / "test")
    with caplog.at_level("INFO"):
        task = load(tree, augment="crop")
    parts = [task.train, task.val, task.test]
    assert [len(part) for part in parts] == [16, 2, 6]
    assert [part.augment for part in parts] == ["crop", "none", "none"]
    assert task.val.normalize == task.test.normalize == task.train.normalize
    both = torch.cat([raw(task.train), raw(task.val)])
    assert sorted(both.flatten(1).tolist()) == sorted(raw(every).flatten(1).tolist())
    assert caplog.messages[-1] == f"{tree}: has no val/, so one image in 10 of train/ validates"
    limited = load(tree, limit_per_class=1)  # The first of each, in every part.
    assert torch.equal(raw(limited.val), raw(task.val))  # Held out before.
    assert torch.equal(raw(limited.test), raw(task.test)[::2])


@pytest.mark.parametrize("name", ["a.JPEG", "a.png", "a.bmp", "a.WEBP"])
def test_pictures_of_every_format(tree: Path, name: str) -> None:
    """One flat colour: only JPEG's colour transform rounds, to within 2 of 255. PNG: a palette."""
    flat = np.full((8, 8, 3), (10, 120, 230), dtype=np.uint8)
    image = Image.fromarray(flat).convert("P" if name == "a.png" else "RGB", palette=1)
    image.save(tree / "train" / "bee" / name, lossless=True)  # What only WebP reads.
    off = raw(load(tree).train)[12].int() - pixels_of(flat).int()
    assert off.abs().max() <= (2 if name == "a.JPEG" else 0)


def test_16_bits_of_grey_are_scaled_and_other_sizes_cut_to_their_middle(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 255], [256, 5000, 40000, 65535]] * 2, dtype=np.uint16)
    path = str(save(tmp_path / "deep.png", values))
    # round(value / 257): 128 is below half of 257, 129 above.
    expected = torch.tensor([[0, 0, 1, 1], [1, 19, 156, 255]] * 2, dtype=torch.uint8)
    for channels in (1, 3):
        assert torch.equal(decode(path, channels, 4), expected.expand(channels, 4, 4))
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 200  # The middle third.
    path = str(save(tmp_path / "wide.png", wide))
    assert decode(path, 3, 4).unique().tolist() == [200]
    grey = np.asarray(Image.fromarray(wide).convert("L"))[:, 4:8]
    assert decode(path, 1, 4)[0].tolist() == grey.tolist()
    assert decode(path, 1, 8).shape == (1, 8, 8)


@pytest.mark.parametrize("link", ["train/ant/z.png", "train/dog", "val/bee/z.png", "val"])
def test_links_that_leave_a_tree_are_refused(tree: Path, tmp_path_factory: Any, link: str) -> None:
    outside = tmp_path_factory.mktemp("outside")
    secret = save(outside / "secret.png", picture(1))
    if link == "val":
        (tree / link).rename(tree / "moved")
    target = secret if link == "train/ant/z.png" else outside
    target = Path("../../../../etc/passwd") if link.startswith("val/") else target
    (tree / link).symlink_to(target)
    text = f"{tree / link}: a link that leaves {tree}; put the files themselves there"
    assert refused(DataError, load, tree) == text


def test_unreadable_images_and_those_of_absurd_size_are_named(tree: Path) -> None:
    path = tree / "train" / "bee" / "3.png"
    late = load(tree, cache_bytes=0).train
    whole = path.read_bytes()
    Image.fromarray(picture(0)).save(path, format="GIF")  # Whatever its name.
    for content in (path.read_bytes(), whole[:60], b"", b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        path.write_bytes(content)
        for call in (lambda: load(tree), lambda: list(Loader(late, 4, shuffle=False).epoch(0))):
            text = refused(DataError, call)
            assert text.startswith(f"{path}: not a readable JPEG or PNG or WebP or BMP (")
            assert text.endswith("; replace or remove it")
    Image.new("1", (8192, 8193)).save(path)
    path.write_bytes(path.read_bytes()[:60])  # The header is enough.
    assert "(8192 x 8193 pixels are too many); replace or rem" in refused(DataError, load, tree)


def test_trees_and_options_that_do_not_fit(tree: Path) -> None:
    (tree / "train" / "ant" / "z.png").symlink_to("0.png")  # A link within the tree is followed.
    (tree / "train" / "ant" / "loop.png").symlink_to("loop.png")
    train = load(tree).train
    assert torch.equal(raw(train)[6], raw(train)[0])
    for given, text in (
        ({"classes": 10}, f"dataset.classes=10: {tree}/train has 3; set dataset.classes=3"),
        ({"channels": 2}, "dataset.channels=2: must be one of 1, 3"),
        ({"image_size": 0}, "dataset.image_size=0: must be a whole number >= 1"),
        ({"cache_bytes": -1}, "dataset.cache_bytes=-1: must be a whole number >= 0"),
        ({"limit_per_class": 0}, "dataset.limit_per_class=0: must be a whole number >= 1"),
        ({"std": [0.5] * 3}, "dataset.mean=None, dataset.std=[0.5, 0.5, 0.5]: "),
        ({"mean": [0.5], "std": [0.5] * 3}, "dataset.mean=[0.5], "),
        (
            {"mean": [0.5] * 3, "std": [0.5, 0, 0.5]},
            "dataset.mean=[0.5, 0.5, 0.5], dataset.std=[0.5, 0,",
        ),
        ({"mean": [0.5, np.nan, 1], "std": [1] * 3}, "dataset.mean=[0.5, nan, 1], "),
    ):
        assert refused(ConfigError, load, tree, **given).startswith(text)
    (tree / "train" / "zebra").mkdir()
    assert "zebra: has no .jpg or .jpeg or .png or .webp or .bmp; add" in refused(
        DataError, load, tree
    )
    (tree / "train" / "zebra").rmdir()
    (tree / "val" / "cat").rename(tree / "val" / "dog")
    assert "must hold the same class folders, but cat is in one" in refused(DataError, load, tree)
    (tree / "val").rename(tree / "valid")
    assert refused(DataError, load, tree) == (
        f"dataset.root={tree}: needs the folders train/<class>/ and val/<class>/ or test/<class>/ "
        "with images; set dataset.root to such a tree"
    )


def test_the_normalisation_may_be_given_and_a_stranger_is_told_the_rest(tree: Path) -> None:
    shown = picture(0, side=12)[:9]
    save(tree / "val" / "ant" / "0.png", shown)
    mean, std = [0.5, 0.25, 0.0], [0.5, 1.0, 2.0]
    task = load(tree, mean=mean, std=std)
    assert task.class_names == CLASSES
    scope = {"PIL": PIL, "image": Image.fromarray(shown), "size": (8, 8)}
    image = eval(task.preprocessing["resize"], scope)
    assert torch.equal(pixels_of(image), raw(task.val)[0])
    images, _ = task.train.fetch_batch([0])
    low, by = (torch.tensor(numbers).view(3, 1, 1) for numbers in (mean, std))
    expected = (raw(task.train)[:1].double() / 255 - low) / by
    # Two roundings of float32 of numbers below 4.
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=4 * 2**-23)
    assert task.val.normalize == task.train.normalize
