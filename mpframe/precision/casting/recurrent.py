"""Recurrent layers of torch refuse inputs whose format is not their weights', before any op runs.

Under torch.autocast the question is not asked, for the op casts both. Here the input is brought to
the weights' format when the layer is entered, and the op then casts both, as for every other layer.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from mpframe.precision.casting.blocks import present_mode
from mpframe.precision.pins import cast_to
from mpframe.precision.policy import Policy
from mpframe.tree import map_tensors


def fit_recurrent_layers(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Hook every LSTM, GRU and RNN of `model`; outside a cast block the hook does nothing."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    return [layer.register_forward_pre_hook(_Fit(policy), with_kwargs=True) for layer in layers]


@dataclass(frozen=True)
class _Fit:
    policy: Policy

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if present_mode(self.policy) is None:
            return None
        weight = next(layer.parameters())
        return map_tensors(lambda tensor: cast_to(tensor, weight.dtype), (args, kwargs))
