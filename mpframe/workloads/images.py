"""Networks for images: a perceptron, a small convolutional one, and a ResNet-18.

`model=NAME` chooses one. A `_target_` may name any other class or function that returns a module.
Models are plain PyTorch: nothing in them mentions precision. A ConfigError names an argument that
is out of its range.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from mpframe.core.ranges import Range, require, require_whole


def require_sizes(**sizes: int) -> None:
    """Check that each option `model.<name>` is a whole number >= 1."""
    for name, size in sizes.items():
        require_whole(f"model.{name}", size)


def require_dropout(dropout: float, name: str = "dropout") -> None:
    """Check that the option `model.<name>` is a fraction, 0 <= dropout < 1."""
    require(f"model.{name}", dropout, Range(low=0.0, below=1.0), kind="")


def mlp(
    in_features: int | Sequence[int],
    classes: int,
    hidden: int = 256,
    depth: int = 2,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a perceptron from samples [N, ...] to [N, classes], with `depth` hidden layers.

    `in_features` is how many numbers a sample has, or the sizes of its dimensions. See
    conf/model/mlp.yaml.
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
        net.add_module(f"hidden{number}", hidden_layer(before, after, dropout))
    net.add_module("head", nn.Linear(hidden, classes))
    return net


def hidden_layer(
    in_features: int, out_features: int, dropout: float, norm: bool = False
) -> nn.Sequential:
    """Return a linear layer and a ReLU, then a batch norm and dropout if they are wanted."""
    layer = nn.Sequential()
    layer.add_module("linear", nn.Linear(in_features, out_features))
    layer.add_module("relu", nn.ReLU())
    if norm:
        layer.add_module("norm", nn.BatchNorm1d(out_features))
    if dropout > 0:
        layer.add_module("dropout", nn.Dropout(dropout))
    return layer


def cnn(
    channels: int, classes: int, width: int = 32, stages: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Return a map from images [N, channels, H, W], H and W at least 2^stages, to [N, classes].

    Two stages suit sides of 8 to 32, three or four larger images. See conf/model/cnn.yaml.
    """
    require_sizes(channels=channels, classes=classes, width=width, stages=stages)
    require_dropout(dropout)
    net = nn.Sequential()
    for number in range(stages):
        # No bias: the norm that follows would subtract it again.
        stage = two_convolutions(channels, width * 2**number, bias=False)
        stage.add_module("pool", nn.MaxPool2d(2))
        net.add_module(f"stage{number + 1}", stage)
        channels = width * 2**number
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    if dropout > 0:
        net.add_module("dropout", nn.Dropout(dropout))
    net.add_module("head", nn.Linear(channels, classes))
    return net


def two_convolutions(in_channels: int, out_channels: int, bias: bool) -> nn.Sequential:
    """Return two 3x3 convolutions that keep the side, each with a batch norm and a ReLU."""
    stage = nn.Sequential()
    for number, wide in enumerate((in_channels, out_channels), start=1):
        conv = nn.Conv2d(wide, out_channels, kernel_size=3, padding=1, bias=bias)
        stage.add_module(f"conv{number}", conv)
        stage.add_module(f"norm{number}", nn.BatchNorm2d(out_channels))
        stage.add_module(f"relu{number}", nn.ReLU())
    return stage


_BLOCKS = [2, 2, 2, 2]


def resnet18(
    classes: int, channels: int = 3, width: int = 64, small_stem: bool = True
) -> nn.Module:
    """Return a map from images [N, channels, H, W] to [N, classes].

    `small_stem` is for images of about 32 x 32. Without it the stem is torchvision's, a 7x7 of
    stride 2 with pooling, for about 224 x 224. See conf/model/resnet18.yaml.
    """
    require_sizes(classes=classes, channels=channels, width=width)
    # torchvision fixes the first width at 64. Its layers are made on the meta device, where they
    # cost nothing and draw no random numbers, and are then all replaced.
    with torch.device("meta"):
        net: Any = ResNet(BasicBlock, _BLOCKS, num_classes=classes)
    size, stride = (3, 1) if small_stem else (7, 2)
    net.conv1 = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    if small_stem:
        net.maxpool = nn.Identity()
    net.inplanes = width
    for stage, blocks in enumerate(_BLOCKS):
        layer = net._make_layer(BasicBlock, width * 2**stage, blocks, stride=1 + (stage > 0))
        setattr(net, f"layer{stage + 1}", layer)
    net.fc = nn.Linear(8 * width, classes)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    resnet: nn.Module = net
    return resnet
