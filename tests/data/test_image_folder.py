"""Image folders made here: right pixels and classes, nothing outside the tree, no odd formats."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.ImageOps
import pytest
import torch
from PIL import Image
from torch import Tensor

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import ArrayImages, Images, Loader, Task, image_folder
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


def load(root: Path, **options: Any) -> Task:
    facts: dict[str, Any] = {"image_size": 8, "classes": 3, "augment": "none"}
    return image_folder(str(root), **(facts | options))


def parts(task: Any) -> tuple[Images, Images]:
    return task.train, task.val


def raw(part: Images) -> Tensor:
    return part.pixels(torch.arange(len(part)))


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_pixels_and_classes(tree: Path, cache_bytes: int) -> None:
    train, val = parts(load(tree, cache_bytes=cache_bytes))
    assert type(train) is type(val) is (ArrayImages if cache_bytes else FileImages)
    expected = torch.stack([torch.from_numpy(picture(n)).permute(2, 0, 1) for n in range(6)])
    assert torch.equal(raw(train), expected.repeat(3, 1, 1, 1))
    assert train.targets.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert torch.equal(raw(val), expected[:2].repeat(3, 1, 1, 1))


def test_the_task_says_how_a_stranger_prepares_an_image(tree: Path) -> None:
    save(tree / "val" / "ant" / "0.png", picture(0, side=12)[:9])
    task = load(tree)
    assert task.class_names == CLASSES
    how = task.preprocessing
    assert how is not None
    scope = {"PIL": PIL, "image": Image.fromarray(picture(0, side=12)[:9]), "size": (8, 8)}
    pixels = torch.from_numpy(np.array(eval(how["resize"], scope))).permute(2, 0, 1)
    assert torch.equal(pixels, raw(parts(task)[1])[0])


def test_a_test_folder_is_the_test_part(tree: Path) -> None:
    assert load(tree).test is None
    for name in CLASSES:
        save(tree / "test" / name / "0.png", picture(9))
    task = load(tree, augment="crop")
    assert isinstance(task.test, Images)
    assert [len(part) for part in (task.train, task.val, task.test)] == [18, 6, 3]
    assert torch.equal(raw(task.test)[2], torch.from_numpy(picture(9)).permute(2, 0, 1))
    assert (task.test.augment, task.test.normalize) == ("none", task.train.normalize)


def test_without_val_one_training_image_in_ten_validates(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tree / "val").rename(tree / "test")
    with caplog.at_level("INFO"):
        task = load(tree, augment="crop")
    assert [len(part) for part in (task.train, task.val, task.test)] == [16, 2, 6]
    assert task.val.augment == "none"
    (tree / "test").rename(tree / "val")
    every = raw(load(tree).train).flatten(1).tolist()
    assert sorted(torch.cat([raw(task.train), raw(task.val)]).flatten(1).tolist()) == sorted(every)
    assert caplog.messages[1] == (
        f"{tree}: has no val/, so one image in 10 of train/ validates and is not trained on"
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_of_grey_are_scaled_and_not_cut_off(tmp_path: Path, channels: int) -> None:
    values = np.array([[0, 128, 129, 255], [256, 5000, 40000, 65535]] * 2, dtype=np.uint16)
    path = tmp_path / "deep.png"
    Image.fromarray(values).save(path)
    with Image.open(path) as image:
        assert image.mode.startswith("I")
    # round(value / 257): 128 is below half of 257, 129 above.
    expected = torch.tensor([[0, 0, 1, 1], [1, 19, 156, 255]] * 2, dtype=torch.uint8)
    assert torch.equal(decode(str(path), channels, 4), expected.expand(channels, 4, 4))


def test_what_is_left_out_is_counted(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("y.gif", "z.gif"):
        Image.fromarray(picture(0)).save(tree / "train" / "bee" / name)
    load(tree)
    assert [record.getMessage() for record in caplog.records] == [
        f"warning: {tree}/train: left out 2 .gif, 1 .txt; only .jpg, .jpeg, .png, .webp or .bmp "
        "are read"
    ]


def test_decoding_late_changes_nothing(tree: Path) -> None:
    """Memory is used up to cache_bytes."""
    needed = (18 + 6) * 3 * 8 * 8
    early, late = (load(tree, augment="crop_flip", cache_bytes=n) for n in (needed, needed - 1))
    assert (type(early.train), type(late.train)) == (ArrayImages, FileImages)
    batches = [list(Loader(t.train, 4, seed=3, shuffle=True).epoch(1)) for t in (early, late)]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_limit_per_class_takes_the_first_of_each(tree: Path) -> None:
    """After the validation was held out."""
    train, val = parts(load(tree, limit_per_class=4))
    assert train.targets.bincount().tolist() == [4, 4, 4]
    assert val.targets.bincount().tolist() == [2, 2, 2]
    assert torch.equal(raw(train)[4:8], raw(parts(load(tree))[0])[6:10])
    (tree / "val").rename(tree / "test")
    whole, limited = load(tree), load(tree, limit_per_class=1)
    assert torch.equal(raw(limited.val), raw(whole.val))  # type: ignore[arg-type]
    assert limited.test.targets.tolist() == [0, 1, 2]  # type: ignore[union-attr]


# Pictures


FLAT = np.full((8, 8, 3), (10, 120, 230), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "options", "mode"),
    [
        ("a.JPEG", {}, "RGB"),
        ("a.png", {}, "P"),
        ("a.bmp", {}, "RGB"),
        ("a.WEBP", {"lossless": True}, "RGB"),
    ],
)
def test_pictures_of_every_format(tree: Path, name: str, options: Any, mode: str) -> None:
    """One flat colour: only JPEG's colour transform rounds, to within 2 of 255."""
    path = tree / "train" / "bee" / name
    Image.fromarray(FLAT).convert(mode, palette=Image.Palette.ADAPTIVE).save(path, **options)
    expected = torch.from_numpy(FLAT).permute(2, 0, 1)
    found = raw(parts(load(tree))[0])[12].int()
    assert (found - expected.int()).abs().max() <= (2 if name == "a.JPEG" else 0)


def test_other_sizes_are_scaled_and_cut_to_their_middle(tmp_path: Path) -> None:
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 200  # The middle third.
    path = str(save(tmp_path / "wide.png", wide))
    assert decode(path, 3, 4).unique().tolist() == [200]
    grey = np.asarray(Image.fromarray(wide).convert("L"))[:, 4:8]
    assert decode(path, 1, 4)[0].tolist() == grey.tolist()
    assert decode(path, 1, 8).shape == (1, 8, 8)


# Untrusted trees


def test_links_that_leave_the_tree_are_refused(tree: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside")
    save(outside / "secret.png", picture(1))
    for link, target in (
        (tree / "train" / "ant" / "z.png", outside / "secret.png"),
        (tree / "train" / "dog", outside),
        (tree / "val" / "bee" / "z.png", Path("../../../../etc/passwd")),
        (tree / "val", outside),
    ):
        moved = link.with_name("moved")
        if link.exists():
            link.rename(moved)
        link.symlink_to(target)
        with pytest.raises(DataError) as caught:
            load(tree)
        text = f"{link}: a link that leaves {tree}; put the files themselves there"
        assert str(caught.value) == text
        link.unlink()
        if moved.exists():
            moved.rename(link)


@pytest.mark.parametrize(
    ("content", "cache_bytes"),
    [
        (b"", 0),
        ("GIF", 0),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", 2**30),
        ("cut", 0),
        ("cut", 2**30),
    ],
    ids=["empty", "gif", "postscript", "cut short, late", "cut short"],
)
def test_unreadable_images_are_named(tree: Path, content: Any, cache_bytes: int) -> None:
    path = tree / "train" / "bee" / "3.png"
    if content == "GIF":  # Whatever its name.
        Image.fromarray(picture(0)).save(path, format="GIF")
    else:
        path.write_bytes(path.read_bytes()[:60] if content == "cut" else content)
    with pytest.raises(DataError) as caught:
        list(Loader(load(tree, cache_bytes=cache_bytes).train, 4, shuffle=False).epoch(0))
    text = str(caught.value)
    assert text.startswith(f"{path}: not a readable JPEG, PNG, WebP or BMP (")
    assert text.endswith("; replace or remove it")
    assert "\n" not in text


def test_a_picture_of_absurd_size_is_refused_from_its_header(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 8192, 8193, 8, 2, 0, 0, 0)
    path = tmp_path / "bomb.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))
    )
    with pytest.raises(DataError, match=r"\(8192 x 8193 pixels are too many\); replace or remove"):
        decode(str(path), 3, 8)


# Trees and options that do not fit


def test_trees_that_do_not_fit(tree: Path) -> None:
    (tree / "train" / "ant" / "z.png").symlink_to("0.png")  # A link within the tree is followed.
    (tree / "train" / "ant" / "loop.png").symlink_to("loop.png")
    assert torch.equal(raw(parts(load(tree))[0])[6], raw(parts(load(tree))[0])[0])
    (tree / "train" / "zebra").mkdir()
    with pytest.raises(DataError, match=r"zebra: has no .jpg, .* or .bmp; add images or remove"):
        load(tree)
    (tree / "train" / "zebra").rmdir()
    (tree / "val" / "cat").rename(tree / "val" / "dog")
    with pytest.raises(DataError, match="must hold the same class folders, but cat is in one of"):
        load(tree)
    (tree / "val").rename(tree / "valid")
    with pytest.raises(DataError) as caught:
        load(tree)
    assert str(caught.value) == (
        f"dataset.root={tree}: needs the folders train/<class>/ and val/<class>/ or test/<class>/ "
        "with images; set dataset.root to such a tree"
    )


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("classes", 10, "/train has 3; set dataset.classes=3"),
        ("channels", 2, "dataset.channels=2: choose 1 (grey) or 3 (RGB)"),
        ("image_size", 0, "dataset.image_size=0: must be a whole number >= 1"),
        ("cache_bytes", -1, "dataset.cache_bytes=-1: must be a whole number >= 0"),
        ("limit_per_class", 0, "dataset.limit_per_class=0: must be a whole number >= 1"),
    ],
)
def test_options_out_of_range(tree: Path, option: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tree, **{option: value})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_normalisation_may_be_given(tree: Path) -> None:
    train, val = parts(load(tree, mean=[0.5, 0.25, 0.0], std=[0.5, 1.0, 2.0]))
    images, _ = train.fetch_batch([0])
    expected = (raw(train)[:1].double() / 255 - torch.tensor([0.5, 0.25, 0.0]).view(3, 1, 1)) / (
        torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    )
    # Two roundings of float32 of numbers below 4.
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=4 * 2**-23)
    assert val.normalize == train.normalize


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "std=null"),
        ({"std": [0.5, 0.5, 0.5]}, "mean=null"),
        ({"mean": [0.5], "std": [0.5, 0.5, 0.5]}, r"mean=\[0.5\]"),
        ({"mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]}, r"std=\[0.5, 0.0, 0.5\]"),
        ({"mean": [0.5, float("nan"), 0.5], "std": [0.5] * 3}, r"mean=\[0.5, nan, 0.5\]"),
    ],
)
def test_half_a_normalisation_is_refused(tree: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dataset.{named}: .* 3 numbers each, one per channel"):
        load(tree, **given)
