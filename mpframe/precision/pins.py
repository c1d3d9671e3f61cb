"""Module pins: a module, with everything inside it, in one format whatever the lists say.

    ops.modules: {"head.*": fp32, "encoder.0": half, "blocks.*": mxfp8, "blocks.0": none}

A pin is a pair of hooks. Entering a module pinned to fp32 or half casts its inputs and pushes the
pin on the cast mode: while the module runs, ops of `allow` and `deny` all compute in that format. A
recipe's name, or `none`, only changes how products are computed. Outside a cast block a pin does
nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mpframe.errors import ConfigError
from mpframe.precision.casting.blocks import present_mode
from mpframe.precision.op_lists import PINS
from mpframe.precision.policy import CASTABLE, Policy
from mpframe.tree import map_tensors


def pin_modules(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Hook every module that a pattern matches, or that is inside such a module."""
    handles = []
    for name, module in model.named_modules():
        pin = policy.pin_of(name)
        if pin is not None:
            enter, leave = _Enter(policy, name, pin[1]), _Leave(policy, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def check_patterns(model: nn.Module, policy: Policy) -> None:
    """Refuse a pattern that matches no module: it is most likely misspelt."""
    names = [name for name, _ in model.named_modules()]
    for pattern in policy.ops.modules:
        if not any(policy.matches(pattern, name) for name in names):
            known = ", ".join(names[1:9]) + (", ..." if len(names) > 9 else "")
            raise ConfigError(f"ops.modules[{pattern!r}] matches no module; the model has {known}")


# Classes and not functions within a function, so that a model with its hooks can be pickled.
@dataclass(frozen=True)
class _Enter:
    policy: Policy
    name: str
    pin: str

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        mode = present_mode(self.policy)
        if mode is None:
            return None
        mode.push_pin(self.name, self.pin)
        if self.pin not in PINS:
            return None
        inside = torch.float32 if self.pin == "fp32" else mode.half()
        return map_tensors(lambda tensor: cast_to(tensor, inside), (args, kwargs))


@dataclass(frozen=True)
class _Leave:
    policy: Policy
    name: str

    def __call__(self, _: nn.Module, args: Any, result: Any) -> Any:
        mode = present_mode(self.policy)
        popped = mode is not None and mode.pop_pin(self.name)
        if not popped or not self.policy.ops.empty:
            return None
        # Without lists no op casts its own inputs, and what follows expects half.
        return map_tensors(lambda tensor: cast_to(tensor, self.policy.half_dtype), result)


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; unchanged if its format is never cast."""
    return tensor.to(dtype) if tensor.dtype in CASTABLE else tensor
