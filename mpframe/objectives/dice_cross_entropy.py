"""Dice loss and cross-entropy: the objective of a class for each pixel.

With the probabilities p and the targets t (1 for the target's class, else 0) of all pixels of a
batch, the soft Dice coefficient of class c compares areas, whatever the class's size (Milletari et
al. 2016); s keeps a class that occurs nowhere from 0 / 0:

    D_c = (2 Σ p_c t_c + s) / (Σ p_c + Σ t_c + s)          L = CE + w (1 - mean over c of D_c)

The sums run over up to millions of pixels. They are fp32, outside the casts.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mpframe.errors import ConfigError
from mpframe.objectives.supervised import Supervised, supervised


class DiceCrossEntropy:
    """The loss of logits [N, classes, ...] and classes [N, ...]; `dice_cross_entropy` makes it."""

    def __init__(self, dice_weight: float, smooth: float) -> None:
        self.dice_weight = dice_weight
        self.smooth = smooth

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, 0-d.

        Args:
            outputs: logits [N, classes, ...], fp32 or wider.
            targets: class numbers [N, ...], int64.
        """
        cross_entropy = F.cross_entropy(outputs, targets)
        probabilities = outputs.softmax(dim=1)
        wanted = torch.zeros_like(outputs).scatter_(1, targets.unsqueeze(1), 1.0)
        pixels = [0, *range(2, outputs.dim())]
        shared = (probabilities * wanted).sum(pixels)
        areas = probabilities.sum(pixels) + wanted.sum(pixels)
        dice = (2 * shared + self.smooth) / (areas + self.smooth)
        return cross_entropy + self.dice_weight * (1 - dice.mean())


def dice_cross_entropy(dice_weight: float = 1.0, smooth: float = 1.0) -> Supervised:
    """Cross-entropy and Dice loss, for batches of images and of classes for their pixels.

    Args:
        dice_weight: w, of the Dice loss, >= 0.
        smooth: s, in pixels, > 0.

    Raises:
        ConfigError: an argument is out of its range.
    """
    if not (math.isfinite(dice_weight) and dice_weight >= 0):
        raise ConfigError(f"objective.dice_weight={dice_weight}: must be a finite number >= 0")
    if not (math.isfinite(smooth) and smooth > 0):
        raise ConfigError(f"objective.smooth={smooth}: must be a finite number > 0")
    return supervised(DiceCrossEntropy(dice_weight, smooth))
