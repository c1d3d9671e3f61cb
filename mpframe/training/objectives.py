"""Objectives whose options a YAML file can hold, made by `supervised` of the engine."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from mpframe.core.errors import ConfigError
from mpframe.core.objective import Supervised, supervised


def cross_entropy(
    weight: Sequence[float] | None = None, label_smoothing: float = 0.0
) -> Supervised:
    """Cross-entropy of logits [N, classes, ...] and classes, or probabilities of classes.

    Args:
        weight: of each class, >= 0 and finite, else ConfigError. None: all 1.
        label_smoothing: the share of each target that is spread over all classes, 0 to 1.
    """
    if weight is not None and not all(math.isfinite(one) and one >= 0 for one in weight):
        raise ConfigError(f"objective.weight={list(weight)}: must be finite numbers >= 0, or null")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"objective.label_smoothing={label_smoothing}: must be >= 0 and <= 1")
    weights = None if weight is None else torch.tensor(weight, dtype=torch.float32)
    return supervised(nn.CrossEntropyLoss(weights, label_smoothing=label_smoothing))


def mse() -> Supervised:
    """The mean squared error of outputs and targets of one shape."""
    return supervised(nn.MSELoss())
