"""Random crops and flips of a whole batch at once, controlled by numbers that are passed in.

Nothing here draws a random number: each function takes uniforms in [0, 1), one row per image, so
that what happens to an image is decided by its key alone (see keyed_random).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpframe.errors import ConfigError, nearest

AUGMENTATIONS = ("none", "crop", "crop_flip")
DRAWS = 3
"""Uniforms one image uses: vertical shift, horizontal shift, flip."""


def require_augmentation(name: str) -> None:
    """Refuse a name that is not in `AUGMENTATIONS`.

    Raises:
        ConfigError: it is not.
    """
    if name not in AUGMENTATIONS:
        allowed = ", ".join(AUGMENTATIONS)
        hint = nearest(str(name), AUGMENTATIONS)
        raise ConfigError(
            f"dataset.augment={name}: allowed are {allowed}" + (f" ({hint})" if hint else "")
        )


def augment(images: Tensor, name: str, uniforms: Tensor) -> Tensor:
    """Apply the augmentation `name`.

    Args:
        images: [N, C, H, W], any dtype.
        name: one of `AUGMENTATIONS`.
        uniforms: [N, DRAWS] in [0, 1).

    Returns:
        Images of the same shape and dtype.
    """
    if name == "none":
        return images
    # An eighth of the side, rounded down: 1 pixel for 8 x 8, 3 for 28 x 28, 4 for 32 x 32.
    padding = max(1, images.shape[-1] // 8)
    images = shifted_crop(images, padding, uniforms[:, :2])
    return mirror(images, uniforms[:, 2]) if name == "crop_flip" else images


def shifted_crop(images: Tensor, padding: int, uniforms: Tensor) -> Tensor:
    """Pad with zeros, then cut a window of the old size at a random place.

    Args:
        images: [N, C, H, W].
        padding: pixels added on each side; shifts reach from -padding to +padding.
        uniforms: [N, 2] in [0, 1), the vertical and the horizontal place.
    """
    count, _, height, width = images.shape
    top, left = (uniforms * (2 * padding + 1)).long().unbind(dim=1)
    padded = F.pad(images, [padding] * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, tops, lefts, H, W], a view
    return windows[torch.arange(count), :, top, left]


def mirror(images: Tensor, uniforms: Tensor) -> Tensor:
    """Swap left and right of the images whose uniform is below one half.

    Args:
        images: [N, C, H, W].
        uniforms: [N] in [0, 1).
    """
    chosen = (uniforms < 0.5).nonzero().squeeze(1)
    return images.index_copy(0, chosen, images.index_select(0, chosen).flip(-1))
