"""Weights of 2-d convolutions with their channels as last dimension (torch.channels_last).

Only the order in memory changes: shapes, names and values stay. What a convolution makes of such a
weight has that order, too, and so has what follows; so batches need no change.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.errors import ConfigError

_SAFE_CHANNELS = 8


def to_channels_last(model: nn.Module) -> None:
    """Store the 4-d weights of `model` in this order, in place.

    Raises:
        ConfigError: it has none, or one that is not safe in this order.
    """
    known = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    if not any(parameter.dim() == 4 for parameter in known):
        raise ConfigError(
            "trainer.channels_last=true: the model has no 2-d convolution (no weight with four "
            "dimensions), so nothing would change; use trainer.channels_last=false"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and _damages_memory(module):
            raise ConfigError(
                f"trainer.channels_last=true: {name} is a 1 x 1 convolution with a stride and "
                f"{module.in_channels} channels, and on some CPUs its backward pass in this order "
                "damages memory; use trainer.channels_last=false or 8 channels and more"
            )
    model.to(memory_format=torch.channels_last)


def _damages_memory(convolution: nn.Conv2d) -> bool:
    """Whether oneDNN writes past the end of its buffers (seen with torch 2.15 on AVX2)."""
    strided = convolution.kernel_size == (1, 1) and max(convolution.stride) > 1
    on_cpu = convolution.weight.device.type == "cpu"
    return on_cpu and strided and convolution.in_channels < _SAFE_CHANNELS
