"""Photographs and their masks: files of the same name in two folders, read as untrusted input."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpframe.data.datasets.images.image_files import decode, list_unlabelled, opened
from mpframe.errors import DataError

_MASK_FORMATS = ("PNG", "BMP")  # A JPEG does not keep numbers.
_ONE_NUMBER = ("1", "L", "P")  # black and white, grey, palette: Pillow's modes of 8 bits or fewer


@dataclass(frozen=True)
class Pair:
    """A photograph and its mask.

    Attributes:
        image: a JPEG, PNG, WebP or BMP file.
        mask: a PNG or BMP file of the same size; its pixels' numbers are classes.
    """

    image: str
    mask: str

    def size(self) -> tuple[int, int]:
        """Height and width in pixels, from the photograph's header.

        Raises:
            DataError: it cannot be read, or the mask has another size.
        """
        with opened(self.image) as image:
            width, height = image.size
        with opened(self.mask, _MASK_FORMATS) as mask:
            wide, high = mask.size
        if (width, height) != (wide, high):
            raise DataError(
                f"{self.mask}: is {wide} x {high} pixels and {self.image} is {width} x {height}; "
                "give both the same size"
            )
        return height, width

    def read(self, channels: int, classes: int) -> tuple[Tensor, Tensor]:
        """The photograph, uint8 [channels, H, W], and its classes, uint8 [H, W].

        Args:
            channels: 1 (grey) or 3 (RGB).
            classes: how many there are.

        Raises:
            DataError: a file cannot be read, or the mask holds another number.
        """
        with opened(self.mask, _MASK_FORMATS) as mask:
            if mask.mode not in _ONE_NUMBER:
                raise ValueError(f"its pixels are {mask.mode}, and not one number of 8 bits each")
            numbers = torch.from_numpy(np.asarray(mask).astype(np.uint8))
        if int(numbers.max()) >= classes:
            raise DataError(
                f"{self.mask}: holds {int(numbers.max())}, and dataset.classes={classes} allows 0 "
                f"to {classes - 1}; the number of a pixel is its class"
            )
        return decode(self.image, channels, None), numbers


def list_pairs(folder: Path) -> list[Pair]:
    """The pairs of `folder`/images and `folder`/masks, by name.

    Raises:
        DataError: a folder is missing or empty, a link leaves it, or a file has no counterpart.
    """
    images, masks = (_by_name(folder / kind) for kind in ("images", "masks"))
    for name, path in (images | masks).items():
        if (name in images) != (name in masks):
            other = folder / ("masks" if name in images else "images")
            raise DataError(
                f"{path}: has no counterpart in {other}; a photograph and its mask have "
                "the same name"
            )
    return [Pair(images[name], masks[name]) for name in sorted(images)]


def _by_name(folder: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for path in list_unlabelled(folder):
        name = str(Path(path).relative_to(folder).with_suffix(""))
        if named.setdefault(name, path) != path:
            raise DataError(f"{path}: {named[name]} has the same name; remove one of them")
    return named
