"""Any tree of train/<class>/*.jpg, val/<class>/*.jpg and test/ as a classification task."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.images.arrays import ArrayImages, Images, Normalize, spread
from mpframe.data.datasets.images.image_files import RESIZE, Listing, decode, list_images
from mpframe.data.facts import require_facts, require_whole
from mpframe.data.task import Task, classification
from mpframe.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_PARTS = ("train", "val", "test")
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
    """The images under `root`: train/ to learn from, val/ to validate, test/ to test.

    One of val/ and test/ may be missing. Without val/ one training image in ten validates, the same
    ones in every run.

    Args:
        root: the tree; class folders are numbered in the order of their names.
        channels: 3 for RGB or 1 for grey; files are converted.
        image_size: pixels a side; the shorter side is scaled to it and the middle kept.
        classes: how many class folders there are.
        augment: none, crop or crop_flip; for training only.
        cache_bytes: decode once and keep all images in memory if they need no more than this;
            else decode each time (set dataset.workers then).
        limit_per_class: use the first so many images of each class, in each part; None uses all.
        mean: of each channel, of pixel values in 0..1; None: of the training images. Images that
            a trained model is measured on are normalised by the numbers it learned with.
        std: likewise.

    Raises:
        ConfigError: an option is out of range or does not fit the tree.
        DataError: folders are missing, differ between the parts, or hold unreadable files.
    """
    _require_options(channels, image_size, cache_bytes, limit_per_class)
    listed = {name: part.first(limit_per_class) for name, part in _list_parts(Path(root)).items()}
    train = listed["train"]
    require_facts(f"{root}/train", classes=(classes, len(train.classes)))
    files = sum(len(part.paths) for part in listed.values())
    in_memory = files * channels * image_size**2 <= cache_bytes
    shape = channels, image_size
    normalize = Normalize.given(mean, std, channels) or _measured(train, shape)
    images = {
        name: _images(part, shape, normalize, augment if name == "train" else "none", in_memory)
        for name, part in listed.items()
    }
    return classification(
        **images,
        class_names=train.classes,
        preprocessing=normalize.described(image_size, resize=RESIZE),
    )


class FileImages(Images):
    """Images decoded from their files each time.

    Args:
        listing: the files and their classes.
        shape: (channels, side) of the decoded images.
        normalize: brings pixels to mean 0 and variance 1.
        augment: one of `augment.AUGMENTATIONS`.
    """

    def __init__(
        self, listing: Listing, shape: tuple[int, int], normalize: Normalize, augment: str
    ) -> None:
        super().__init__(listing.targets, normalize, augment)
        self._paths = listing.paths
        self._shape = shape

    def pixels(self, indices: Tensor) -> Tensor:
        return _decode_all([self._paths[index] for index in indices.tolist()], self._shape)


def _measured(train: Listing, shape: tuple[int, int]) -> Normalize:
    return Normalize.measured(_decode_all(train.paths[spread(len(train.paths))], shape))


def _images(
    listing: Listing, shape: tuple[int, int], normalize: Normalize, augment: str, in_memory: bool
) -> Images:
    if in_memory:
        return ArrayImages(_decode_all(listing.paths, shape), listing.targets, normalize, augment)
    return FileImages(listing, shape, normalize, augment)


def _decode_all(paths: tuple[str, ...] | list[str], shape: tuple[int, int]) -> Tensor:
    channels, side = shape
    images = torch.empty(len(paths), channels, side, side, dtype=torch.uint8)
    for image, path in zip(images, paths, strict=True):
        image.copy_(decode(path, channels, side))
    return images


def _list_parts(root: Path) -> dict[str, Listing]:
    """The images of train, val and, if there is such a folder, test."""
    folders = [name for name in _PARTS if (root / name).is_dir()]
    if "train" not in folders or len(folders) == 1:
        raise DataError(
            f"dataset.root={root}: needs the folders train/<class>/ and val/<class>/ or "
            "test/<class>/ with images; set dataset.root to such a tree"
        )
    listed = {name: list_images(root, name) for name in folders}
    for name, part in listed.items():
        _require_same_classes(root, listed["train"], part, name)
    if "val" not in listed:
        listed["train"], listed["val"] = _validation_held_out(root, listed["train"])
    return listed


def _validation_held_out(root: Path, train: Listing) -> tuple[Listing, Listing]:
    log.info(
        "%s: has no val/, so one image in %d of train/ validates and is not trained on",
        root,
        _ONE_IN,
    )
    left, held = hold_out(train.targets, one_in=_ONE_IN)
    return train.part(left), train.part(held)


def _require_same_classes(root: Path, train: Listing, part: Listing, name: str) -> None:
    if train.classes != part.classes:
        odd = sorted(set(train.classes) ^ set(part.classes))
        raise DataError(
            f"dataset.root={root}: train/ and {name}/ must hold the same class folders, "
            f"but {odd[0]} is in one of them only"
        )


def _require_options(
    channels: int, image_size: int, cache_bytes: int, limit_per_class: int | None
) -> None:
    if channels not in (1, 3):
        raise ConfigError(f"dataset.channels={channels}: allowed are 1 (grey) and 3 (RGB)")
    require_whole("dataset.image_size", image_size, least=1)
    require_whole("dataset.cache_bytes", cache_bytes, least=0)
    if limit_per_class is not None:
        require_whole("dataset.limit_per_class", limit_per_class, least=1)
