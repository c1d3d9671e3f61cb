"""torchvision's ResNet-18 (He et al. 2015), with a stem for small images and a choice of width.

The names of the modules, the initialisation and the forward pass are torchvision's.
"""

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from mpframe.models.checks import require_sizes

_BLOCKS = [2, 2, 2, 2]


def resnet18(
    classes: int, channels: int = 3, width: int = 64, small_stem: bool = True
) -> nn.Module:
    """Maps images [N, channels, H, W] to [N, classes].

    Args:
        classes: outputs.
        channels: of the images.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        small_stem: a 3x3 convolution of stride 1 without pooling, for images of about 32 x 32;
            False is torchvision's 7x7 of stride 2 with pooling, for about 224 x 224.

    Raises:
        ConfigError: an argument is out of its range.
    """
    require_sizes(classes=classes, channels=channels, width=width)
    # torchvision fixes the first width at 64. Its layers are made on the meta device, where they
    # cost nothing and draw no random numbers, and are then all replaced.
    with torch.device("meta"):
        net: nn.Module = ResNet(BasicBlock, _BLOCKS, num_classes=classes)
    _replace_stem(net, channels, width, small_stem)
    _replace_stages(net, width)
    net.fc = nn.Linear(8 * width, classes)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _replace_stem(net: nn.Module, channels: int, width: int, small: bool) -> None:
    if small:
        net.conv1 = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    else:
        net.conv1 = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)


def _replace_stages(net: nn.Module, width: int) -> None:
    in_channels = width
    for stage, blocks in enumerate(_BLOCKS):
        out_channels = width * 2**stage
        layer = nn.Sequential()
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            layer.append(
                BasicBlock(
                    in_channels, out_channels, stride, _shortcut(in_channels, out_channels, stride)
                )
            )
            in_channels = out_channels
        setattr(net, f"layer{stage + 1}", layer)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))
