"""A multi-layer perceptron: linear layers with a ReLU between them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from mpframe.models.checks import require_dropout, require_sizes


def mlp(
    in_features: int | Sequence[int],
    classes: int,
    hidden: int = 256,
    depth: int = 2,
    dropout: float = 0.0,
) -> nn.Module:
    """Maps samples [N, ...] of `in_features` numbers to [N, classes].

    Args:
        in_features: numbers in one sample, or the sizes of its dimensions.
        classes: outputs; 1 for the regression of one number.
        hidden: width of each hidden layer.
        depth: how many hidden layers.
        dropout: fraction of features dropped after each hidden layer, 0 <= dropout < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """
    sizes = [in_features] if isinstance(in_features, int) else list(in_features)
    for size in sizes:
        require_sizes(in_features=size)
    require_sizes(classes=classes, hidden=hidden, depth=depth)
    require_dropout(dropout)
    widths = [math.prod(sizes), *[hidden] * depth]
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    for number, (before, after) in enumerate(pairwise(widths), start=1):
        net.add_module(f"hidden{number}", _hidden_layer(before, after, dropout))
    net.add_module("head", nn.Linear(hidden, classes))
    return net


def _hidden_layer(in_features: int, out_features: int, dropout: float) -> nn.Sequential:
    layer = nn.Sequential()
    layer.add_module("linear", nn.Linear(in_features, out_features))
    layer.add_module("relu", nn.ReLU())
    if dropout > 0:
        layer.add_module("dropout", nn.Dropout(dropout))
    return layer
