"""A small convolutional network: stages of two convolutions, then an average over the image.

The average at the end makes it independent of the image's size, as long as every stage has
something to halve.
"""

from torch import nn

from mpframe.models.checks import require_dropout, require_sizes


def cnn(
    channels: int, classes: int, width: int = 32, stages: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Maps images [N, channels, H, W], H and W at least 2^stages, to [N, classes].

    Args:
        channels: of the images.
        classes: outputs.
        width: channels of the first stage; each later stage doubles them.
        stages: each ends by halving the side; 2 suits 8 x 8 to 32 x 32, 3 or 4 larger images.
        dropout: fraction of features dropped before the head, 0 <= dropout < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """
    require_sizes(channels=channels, classes=classes, width=width, stages=stages)
    require_dropout(dropout)
    net = nn.Sequential()
    for stage in range(stages):
        net.add_module(f"stage{stage + 1}", _stage(channels, width * 2**stage))
        channels = width * 2**stage
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    if dropout > 0:
        net.add_module("dropout", nn.Dropout(dropout))
    net.add_module("head", nn.Linear(channels, classes))
    return net


def _stage(in_channels: int, out_channels: int) -> nn.Sequential:
    stage = nn.Sequential()
    for number, wide in enumerate((in_channels, out_channels), start=1):
        # No bias: the norm that follows would subtract it again.
        conv = nn.Conv2d(wide, out_channels, kernel_size=3, padding=1, bias=False)
        stage.add_module(f"conv{number}", conv)
        stage.add_module(f"norm{number}", nn.BatchNorm2d(out_channels))
        stage.add_module(f"relu{number}", nn.ReLU())
    stage.add_module("pool", nn.MaxPool2d(2))
    return stage
