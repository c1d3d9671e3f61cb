"""A tree of generated photographs, for measuring how fast files are decoded."""

from pathlib import Path

import numpy as np
from PIL import Image

_SIZE = (320, 240)
_PATCHES = (15, 20)  # rows and columns of colours, which fade into each other
_NOISE = 8.0  # of 255: smooth pictures would be smaller, and faster to decode, than real ones


def make_photographs(root: Path, count: int) -> None:
    """Write `count` JPEG files to train on and an eighth as many to validate on, in two classes.

    Args:
        root: a folder, which is made, for train/a/0.jpg and so on.
        count: >= 16.
    """
    generator = np.random.default_rng(0)
    for part, files in (("train", count), ("val", count // 8)):
        for number in range(files):
            path = root / part / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            _photograph(generator).save(path, quality=90)


def _photograph(generator: np.random.Generator) -> Image.Image:
    patches = generator.integers(0, 256, (*_PATCHES, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(patches).resize(_SIZE, Image.Resampling.BICUBIC))
    noisy = smooth + _NOISE * generator.standard_normal(smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
