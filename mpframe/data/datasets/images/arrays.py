"""Images and their class numbers, fetched, augmented and normalised a batch at a time.

A loop in Python takes tens of microseconds for each sample. With small images that is more than
the network takes, so `fetch_batch` does each stage once for the whole batch.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.images.augment import DRAWS, augment, require_augmentation
from mpframe.data.keyed_random import keyed_uniform
from mpframe.errors import ConfigError, DataError


@dataclass(frozen=True)
class Normalize:
    """(pixel - mean) / std per channel, of pixel values in 0..1.

    Attributes:
        mean: one number per channel.
        std: one number per channel, > 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def measured(cls, images: Tensor) -> "Normalize":
        """The statistics of `images` [N, C, H, W], of at most 2,000 evenly spaced ones.

        A channel that is constant keeps std 1.
        """
        pixels = images[spread(len(images))].double() / (
            255.0 if images.dtype == torch.uint8 else 1.0
        )
        std, mean = torch.std_mean(pixels, dim=(0, 2, 3), correction=0)
        return cls(tuple(mean.tolist()), tuple(std.where(std > 0, 1.0).tolist()))

    @classmethod
    def given(
        cls, mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
    ) -> "Normalize | None":
        """The statistics that the options give; None if they give none.

        Args:
            mean: `dataset.mean`, one number per channel.
            std: `dataset.std`, one number > 0 per channel.
            channels: of the images.

        Raises:
            ConfigError: one is missing, or has other numbers than that.
        """
        if mean is None and std is None:
            return None
        for name, numbers, fit in (("mean", mean, isfinite), ("std", std, _above_zero)):
            if numbers is None or len(numbers) != channels or not all(map(fit, numbers)):
                shown = "null" if numbers is None else list(numbers)
                raise ConfigError(
                    f"dataset.{name}={shown}: dataset.mean and dataset.std are null (measured) or "
                    f"{channels} numbers each, one per channel, of pixel values in 0..1, and those "
                    "of dataset.std are above 0"
                )
        assert mean is not None
        assert std is not None
        return cls(tuple(mean), tuple(std))

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise [N, C, H, W], uint8 0..255 or floating 0..1, into float32."""
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        mean, factor = _shift_and_factor(tuple(self.mean), tuple(self.std), top)
        return images.float().sub(mean).mul_(factor)

    def described(
        self, side: int, brightest: float = 255.0, resize: str | None = None
    ) -> dict[str, Any]:
        """What is done to a raw image, as JSON values, for `Task.preprocessing`.

        A raw image of values 0..`brightest` becomes (raw / brightest - mean) / std, per channel.

        Args:
            side: pixels a side.
            brightest: the largest value that a raw pixel can have.
            resize: how an image of another size is brought to this one; None: there is none.
        """
        return {
            "layout": "NCHW",
            "channel_order": "RGB" if len(self.mean) == 3 else "grey",
            "size": [side, side],
            "resize": resize,
            "value_range": [0.0, brightest],
            "mean": list(self.mean),
            "std": list(self.std),
        }


@lru_cache
def _shift_and_factor(
    mean: tuple[float, ...], std: tuple[float, ...], top: float
) -> tuple[Tensor, Tensor]:
    """What to subtract from pixels in 0..`top` and what to multiply by then, each [C, 1, 1].

    Kept, for making them takes longer than normalising a batch of small images.
    """
    shift = torch.tensor(mean).mul_(top).view(-1, 1, 1)
    return shift, torch.tensor(std).mul_(top).reciprocal_().view(-1, 1, 1)


def _above_zero(number: float) -> bool:
    return isfinite(number) and number > 0


def spread(count: int) -> slice:
    """Evenly spaced places among `count`, at most 2,000: enough to represent all of them."""
    return slice(None, None, max(1, -(-count // 2000)))


class Images(Dataset[tuple[Tensor, Tensor]], ABC):
    """Normalised images [C, H, W], float32, and their class numbers, int64.

    Args:
        targets: [N] class numbers.
        normalize: brings pixels to mean 0 and variance 1.
        augment: one of `augment.AUGMENTATIONS`.

    Raises:
        ConfigError: unknown augmentation.
    """

    def __init__(self, targets: Tensor, normalize: Normalize, augment: str) -> None:
        require_augmentation(augment)
        self.targets = targets.long()
        self.normalize = normalize
        self.augment = augment
        self._key = (0, 0)

    @abstractmethod
    def pixels(self, indices: Tensor) -> Tensor:
        """The raw images [len(indices), C, H, W], uint8 0..255 or floating 0..1."""

    def unaugmented(self) -> "Images":
        """The same images as they are, for predictions."""
        plain = copy.copy(self)
        plain.augment = "none"
        return plain

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Choose the augmentation: it depends on (seed, epoch, index) alone."""
        self._key = (seed, epoch)

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples `indices` as one batch, ([N, C, H, W] float32, [N] int64)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        images = self.pixels(chosen)
        if self.augment != "none":
            uniforms = torch.from_numpy(keyed_uniform(DRAWS, *self._key, chosen.numpy()))
            images = augment(images, self.augment, uniforms)
        return self.normalize(images), self.targets.index_select(0, chosen)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.fetch_batch([range(len(self))[index]])
        return images[0], targets[0]


class ArrayImages(Images):
    """Images that fit in memory.

    Args:
        images: [N, C, H, W], uint8 0..255 or floating 0..1.
        targets: [N] class numbers.
        normalize: brings pixels to mean 0 and variance 1.
        augment: one of `augment.AUGMENTATIONS`.

    Raises:
        ConfigError: unknown augmentation.
        DataError: the numbers of images and of targets differ.
    """

    def __init__(
        self, images: Tensor, targets: Tensor, normalize: Normalize, augment: str = "none"
    ) -> None:
        super().__init__(targets, normalize, augment)
        if len(images) != len(targets):
            raise DataError(
                f"dataset: {len(images)} images but {len(targets)} targets; give one for each"
            )
        self.images = images

    def pixels(self, indices: Tensor) -> Tensor:
        return self.images.index_select(0, indices)
