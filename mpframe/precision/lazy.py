"""Lazy layers: their parameters have no shape before the first forward pass.

A parameter without a shape cannot be rounded and has no master.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.errors import ConfigError
from mpframe.precision.storage.reads import call
from mpframe.precision.undisturbed import State


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters without a shape.

    Raises:
        ConfigError: naming the first one.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"model: parameter {name!r} is lazy, it has no shape before the first forward "
                "pass; run the model once first, or prepare it with an example"
            )


def materialize(model: nn.Module, example: Any) -> None:
    """Give lazy layers their shapes and first values by one call of the model, without training.

    Buffers and plain attributes of the other modules stay as they are. A model without lazy layers
    is not called.
    """
    if not any(map(is_lazy, model.parameters())):
        return
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), State.of(model):
            call(model.eval(), example)
    finally:
        for module, training in modes.items():
            module.training = training
