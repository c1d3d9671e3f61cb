"""A folder of images, <split>/<class>/<image>, as a classification task.

The files are untrusted. Only JPEG, PNG, WebP and BMP are decoded, whatever a file's name says:
other formats of the imaging library have started external programs. A symbolic link must point
within the folder, and a picture that claims an absurd size is refused from its header.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mpframe.core.errors import DataError
from mpframe.data.images import ArrayImages, Images, Normalize, spread
from mpframe.data.samples import hold_out
from mpframe.data.task import Task, classification, require_choice, require_counts, require_facts

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_ANY_SUFFIX = " or ".join(SUFFIXES)
# `decode` cuts out the middle of an image of another size, and scales it.
RESIZE = "PIL.ImageOps.fit(image, size, PIL.Image.Resampling.BILINEAR)"
FORMATS = ("JPEG", "PNG", "WebP", "BMP")
_MOST_PIXELS = 2**26
MODES = {1: "L", 3: "RGB"}  # of Pillow, by the number of channels


class Listing(NamedTuple):
    """The images of one split: folder names, files, and their places among these, [N] int64."""

    classes: tuple[str, ...]
    paths: tuple[str, ...]
    targets: Tensor

    def part(self, indices: Tensor) -> "Listing":
        """Return the images of ascending indices [n] int64."""
        paths = tuple(self.paths[index] for index in indices.tolist())
        return Listing(self.classes, paths, self.targets[indices])

    def first(self, per_class: int) -> "Listing":
        """Return the first `per_class` images of each class."""
        starts = torch.searchsorted(self.targets, self.targets)
        return self.part((torch.arange(len(self.targets)) - starts < per_class).nonzero().flatten())


def list_images(root: Path, split: str) -> Listing:
    """List the class folders of `root`/`split`, and warn of files that are left out."""
    _require_inside(root, root / split)
    folders = [path for path in _entries(root, root / split) if path.is_dir()]
    entries = [_entries(root, folder) for folder in folders]
    files = [[str(path) for path in listed if _is_image(path)] for listed in entries]
    for folder, images in zip(folders, files, strict=True):
        if not images:
            raise DataError(f"{folder}: has no {_ANY_SUFFIX}; add images or remove the folder")
    paths = tuple(chain.from_iterable(files))
    _warn_of(sum(map(len, entries)) - len(paths), root / split)
    counts = torch.tensor([len(images) for images in files], dtype=torch.int64)
    targets = torch.arange(len(folders)).repeat_interleave(counts)
    return Listing(tuple(folder.name for folder in folders), paths, targets)


def list_unlabelled(root: Path) -> tuple[str, ...]:
    """List the images in and below `root`, by name, and warn of files that are left out."""
    files: list[Path] = []
    waiting = [root]
    while waiting:
        entries = _entries(root, waiting.pop())
        waiting += [path for path in entries if path.is_dir() and not path.is_symlink()]
        files += [path for path in entries if not path.is_dir()]
    paths = sorted(str(path) for path in files if _is_image(path))
    if not paths:
        raise DataError(f"{root}: has no {_ANY_SUFFIX}; name a folder with images")
    _warn_of(len(files) - len(paths), root)
    return tuple(paths)


def decode(path: str, channels: int, side: int | None) -> Tensor:
    """Decode one image: uint8 [channels, side, side], or of the image's size if `side` is None.

    The shorter side is scaled to `side` and the middle kept. 16 bits become 8: grey values are
    divided by 257 and rounded. DataError: not a readable image, or above 2^26 pixels.
    """
    with open_image(path) as image:
        pixels = _in_8_bits(image).convert(MODES[channels])
        if side is not None and pixels.size != (side, side):
            pixels = ImageOps.fit(pixels, (side, side), Image.Resampling.BILINEAR)
    array = np.asarray(pixels).reshape(pixels.height, pixels.width, channels)
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


@contextmanager
def open_image(path: str, formats: tuple[str, ...] = FORMATS) -> Iterator[Image.Image]:
    """Open an image in one of `formats`, and blame the file for errors within the block."""
    try:
        with Image.open(path, formats=formats) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            yield image
    except Exception as error:  # A damaged file fails in the decoder's own many ways.
        raise DataError(
            f"{path}: not a readable {' or '.join(formats)} ({error}); replace or remove it"
        ) from error


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Bring a grey image of 16 bits to 8, as the library would cut off all values above 255."""
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _warn_of(others: int, folder: Path) -> None:
    if others:
        log.warning("warning: %s: left out %d files that are no %s", folder, others, _ANY_SUFFIX)


def _entries(root: Path, folder: Path) -> list[Path]:
    """List what `folder` holds, sorted by name, without hidden names."""
    try:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from error
    for path in entries:
        _require_inside(root, path)
    return entries


def _require_inside(root: Path, path: Path) -> None:
    # realpath and not resolve, which fails on a link to itself.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root.resolve()):
        raise DataError(f"{path}: a link that leaves {root}; put the files themselves there")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


_ONE_IN = 10  # of the training images validates if there is no val/


def image_folder(
    root: str = "data/images",
    channels: int = 3,
    image_size: int = 32,
    classes: int = 10,
    augment: str = "crop_flip",
    cache_bytes: int = 2**30,
    limit_per_class: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Task:
    """Return the images under `root`: train/ to learn from, val/ to validate, test/ to test.

    One of val/ and test/ may be missing. Without val/ one training image in ten validates, the same
    ones in every run. Class folders are numbered in the order of their names. Images that need more
    than `cache_bytes` are decoded each time (set dataset.workers then). To measure a trained model
    on other images, give the `mean` and `std` that it learned with.

    ConfigError: an option is out of range or does not fit the tree. DataError: folders are missing,
    differ between the parts, or hold unreadable files.
    """
    require_choice("channels", channels, MODES)
    require_counts(image_size=image_size)
    require_counts(0, cache_bytes=cache_bytes)
    listed = _list_parts(Path(root))
    if limit_per_class is not None:
        require_counts(limit_per_class=limit_per_class)
        listed = {name: part.first(limit_per_class) for name, part in listed.items()}
    train = listed["train"]
    require_facts(f"{root}/train", classes=(classes, len(train.classes)))
    files = sum(len(part.paths) for part in listed.values())
    in_memory = files * channels * image_size**2 <= cache_bytes
    shape = channels, image_size
    normalize = Normalize.given(mean, std, channels) or Normalize.measured(
        _decode_all(train.paths[spread(len(train.paths))], *shape)
    )
    images: dict[str, Images] = {}
    for name, part in listed.items():
        how = augment if name == "train" else "none"
        if in_memory:
            pixels = _decode_all(part.paths, *shape)
            images[name] = ArrayImages(pixels, part.targets, normalize, how)
        else:
            images[name] = FileImages(part, shape, normalize, how)
    preprocessing = normalize.described(image_size, resize=RESIZE)
    return classification(**images, class_names=train.classes, preprocessing=preprocessing)


class FileImages(Images):
    """Images that are decoded each time, to `shape` (channels, side)."""

    def __init__(
        self, listing: Listing, shape: tuple[int, int], normalize: Normalize, augment: str
    ) -> None:
        super().__init__(listing.targets, normalize, augment)
        self._paths, self._shape = listing.paths, shape

    def pixels(self, indices: Tensor) -> Tensor:
        return _decode_all([self._paths[index] for index in indices.tolist()], *self._shape)


def _decode_all(paths: Sequence[str], channels: int, side: int) -> Tensor:
    images = torch.empty(len(paths), channels, side, side, dtype=torch.uint8)
    for image, path in zip(images, paths, strict=True):
        image.copy_(decode(path, channels, side))
    return images


def _list_parts(root: Path) -> dict[str, Listing]:
    """List the images of train, val and, if there is such a folder, test."""
    folders = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    if "train" not in folders or len(folders) == 1:
        raise DataError(
            f"dataset.root={root}: needs the folders train/<class>/ and val/<class>/ or "
            "test/<class>/ with images; set dataset.root to such a tree"
        )
    listed = {name: list_images(root, name) for name in folders}
    for name, part in listed.items():
        if odd := sorted(set(part.classes) ^ set(listed["train"].classes)):
            raise DataError(
                f"dataset.root={root}: train/ and {name}/ must hold the same class folders, "
                f"but {odd[0]} is in one of them only"
            )
    if "val" not in listed:
        log.info("%s: has no val/, so one image in %d of train/ validates", root, _ONE_IN)
        train = listed["train"]
        listed["train"], listed["val"] = map(train.part, hold_out(train.targets, one_in=_ONE_IN))
    return listed
