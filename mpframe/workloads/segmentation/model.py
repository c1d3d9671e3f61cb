"""A U-Net (Ronneberger et al. 2015) with batch norm and padded convolutions, and its objective.

Each stage of the encoder halves the side and doubles the channels. The decoder reverses that, and
also reads the encoder's features of the same side. With width 64, four stages, three channels and
nine classes it has the 7,703,497 parameters of the network whose speed in mixed precision was
published. The objective is the Dice loss plus cross-entropy.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpframe.core.errors import ConfigError
from mpframe.core.objective import Supervised, supervised
from mpframe.core.ranges import NOT_NEGATIVE, POSITIVE, require
from mpframe.workloads.images import require_sizes, two_convolutions


class UNet(nn.Module):
    """A U-Net for sides that are multiples of 2^(stages - 1), see conf/model/unet.yaml."""

    def __init__(self, channels: int, classes: int, width: int = 64, stages: int = 4) -> None:
        super().__init__()
        require_sizes(channels=channels, classes=classes, width=width, stages=stages)
        widths = [width * 2**stage for stage in range(stages)]
        self.multiple = 2 ** (stages - 1)
        self.encoder = nn.ModuleList(
            two_convolutions(before, after, bias=True)
            for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        back = widths[-2::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in back)
        self.decoder = nn.ModuleList(two_convolutions(2 * n, n, bias=True) for n in back)
        self.head = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes, H, W] of images [N, channels, H, W], floating."""
        if images.shape[-1] % self.multiple or images.shape[-2] % self.multiple:
            raise ConfigError(
                f"model.stages: halves images of {list(images.shape[-2:])} to no whole number; use "
                f"sides that are multiples of {self.multiple} (dataset.image_size) or fewer stages"
            )
        features = images
        skipped: list[Tensor] = []
        for stage in self.encoder:
            features = stage(self.pool(features) if skipped else features)
            skipped.append(features)
        for up, stage, skip in zip(self.up, self.decoder, skipped[-2::-1], strict=True):
            features = stage(torch.cat([skip, up(features)], dim=1))
        logits: Tensor = self.head(features)
        return logits


def dice_cross_entropy_loss(
    outputs: Tensor, targets: Tensor, dice_weight: float, smooth: float
) -> Tensor:
    """Return the loss, 0-d, of logits [N, classes, ...] and int64 classes [N, ...]."""
    cross_entropy = F.cross_entropy(outputs, targets)
    probabilities = outputs.softmax(dim=1)
    wanted = torch.zeros_like(outputs).scatter_(1, targets.unsqueeze(1), 1.0)
    pixels = [0, *range(2, outputs.dim())]
    shared = (probabilities * wanted).sum(pixels)
    areas = probabilities.sum(pixels) + wanted.sum(pixels)
    dice = (2 * shared + smooth) / (areas + smooth)
    return cross_entropy + dice_weight * (1 - dice.mean())


def dice_cross_entropy(dice_weight: float = 1.0, smooth: float = 1.0) -> Supervised:
    """Return the objective of batches of images and classes of their pixels.

    It is cross-entropy + w * Dice loss, where w is `dice_weight` >= 0. `smooth` > 0, in pixels, is
    added to both sides of each class's Dice fraction.
    """
    require("objective.dice_weight", dice_weight, NOT_NEGATIVE, kind="a finite number")
    require("objective.smooth", smooth, POSITIVE, kind="a finite number")
    return supervised(partial(dice_cross_entropy_loss, dice_weight=dice_weight, smooth=smooth))
