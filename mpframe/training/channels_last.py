"""Weights of 2-d convolutions with their channels as last dimension (torch.channels_last).

Only the order in memory changes: shapes, names and values stay. What a convolution makes of such a
weight has that order, too, and so has what follows; so batches need no change.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.errors import ConfigError


def to_channels_last(model: nn.Module) -> None:
    """Store the 4-d weights of `model` in this order, in place.

    Raises:
        ConfigError: it has none.
    """
    known = (parameter for parameter in model.parameters() if not is_lazy(parameter))
    if not any(parameter.dim() == 4 for parameter in known):
        raise ConfigError(
            "trainer.channels_last=true: the model has no 2-d convolution (no weight with four "
            "dimensions), so nothing would change; use trainer.channels_last=false"
        )
    model.to(memory_format=torch.channels_last)
