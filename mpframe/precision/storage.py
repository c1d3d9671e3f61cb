"""The format each weight is stored in: the one that its ops compute in.

In `mixed` a weight is half if every op that reads it computes in half, and fp32 otherwise. A trace
shows which ops these are (trace.py). For a weight that no trace has seen, the module's class tells
the op: half for a layer of torch.nn whose op is in `allow`. A pin of its module comes before both,
and without any lists all weights are half.

A tied weight takes the widest format that any of its modules wants. With lists, the running
statistics that BatchNorm writes stay in fp32, and so do the weights beside them.
"""

import re
from collections.abc import Set
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpframe.core.comm import is_sharded
from mpframe.core.errors import ConfigError
from mpframe.core.optim.masters import convert_buffer, exact_value
from mpframe.core.tree import HALF
from mpframe.precision.op_lists import WITH_STATISTICS, canonical, known_ops
from mpframe.precision.policy import CASTABLE, Policy
from mpframe.precision.trace import Use, WeightUses

Formats = dict[nn.Parameter, torch.dtype]
_EXCEPTIONS = {  # Classes that are not named after their op.
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MultiheadAttention": "scaled_dot_product_attention",
    "ReLU6": "hardtanh",
    "Softmin": "softmax",
    "Upsample": "interpolate",
}


def op_of(module: nn.Module) -> str | None:
    """Return the name of the op `module` runs, or None if it is not a layer of torch.nn."""
    if isinstance(module, nn.RNNBase):
        return str(module.mode).lower()  # lstm, gru, rnn_tanh, rnn_relu
    if isinstance(module, nn.RNNCell):
        return f"rnn_{module.nonlinearity}_cell"
    return next((op for cls in type(module).__mro__ if (op := _find_op(cls))), None)


@cache
def _find_op(cls: type) -> str | None:
    if not cls.__module__.startswith("torch.nn.modules"):
        return None
    if cls.__name__[:-2].endswith("Pad"):  # ConstantPad1d, ZeroPad2d, ...
        return "pad"
    name = cls.__name__.lower().strip("_")
    spellings = (name, name.removesuffix("loss"), re.sub(r"\dd$", "", name))
    found = filter(None, map(_index_ops().get, spellings))
    return _EXCEPTIONS.get(cls.__name__) or next(found, None)


@cache
def _index_ops() -> dict[str, str]:
    """Return ops by name without underscores, because class names have none."""
    public = (op for op in known_ops() if not op.startswith("_"))
    return {op.replace("_", ""): canonical(op) for op in public}


def formats_of(model: nn.Module, policy: Policy, uses: WeightUses) -> Formats:
    """Return the format each parameter is stored in, its present one if it is never cast."""
    formats: Formats = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            wanted = choose_format(name, module, policy, uses.by_weight.get(parameter))
            widest = wanted if formats.get(parameter, wanted) == wanted else torch.float32
            formats[parameter] = widest if parameter.dtype in CASTABLE else parameter.dtype
    return formats


def choose_format(
    name: str, module: nn.Module, policy: Policy, uses: Set[Use] | None = None
) -> torch.dtype:
    """Return the format `module` wants for a parameter, which these ops read if it was traced."""
    op, pin = op_of(module), policy.format_pin_of(name)
    if pin is not None:
        half = pin[1] == "half"
    elif uses is not None and not policy.ops.empty:
        half = all(use.in_half(policy) for use in uses)
    else:
        half = policy.ops.empty or (op is not None and policy.ops.list_of(op) == "allow")
    half = half and (policy.ops.empty or op not in WITH_STATISTICS)
    return policy.half_dtype if half and policy.mode == "mixed" else torch.float32


@torch.no_grad()
def store(model: nn.Module, policy: Policy, uses: WeightUses) -> dict[Tensor, Tensor]:
    """Convert every weight to its format, in place, from its master if it has one.

    Values beyond the half range are clamped to it. A weight that is sharded among ranks keeps its
    format.

    Returns:
        For each weight that was rounded, its fp32 value from before the rounding.

    Raises:
        ConfigError: a parameter is complex, or lazy and to be cast. Then nothing is changed.
    """
    _check_parameters(model, policy)
    before: dict[Tensor, Tensor] = {}
    for parameter, dtype in formats_of(model, policy, uses).items():
        if parameter.dtype != dtype and not is_sharded(parameter):
            exact = exact_value(parameter)
            limit = torch.finfo(dtype).max
            values = parameter.data.float() if exact is None else exact
            parameter.data = values.clamp(-limit, limit).to(dtype)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(dtype)
            if exact is not None and dtype in HALF:
                before[parameter] = exact
    for name, module in model.named_modules():
        _store_buffers(module, choose_format(name, module, policy), policy)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return before


def _store_buffers(module: nn.Module, wanted: torch.dtype, policy: Policy) -> None:
    if op_of(module) in WITH_STATISTICS or (policy.mode == "mixed" and policy.ops.empty):
        for buffer in module.buffers(recurse=False):
            if buffer.dtype in CASTABLE:
                plain = buffer.layout is torch.strided and not is_lazy(buffer)
                convert: Any = convert_buffer if plain else Tensor.to
                buffer.data = convert(buffer.data, wanted)


def _check_parameters(model: nn.Module, policy: Policy) -> None:
    for name, parameter in model.named_parameters():
        if policy.mode != "fp32" and is_lazy(parameter):
            raise ConfigError(
                f"model: parameter {name!r} is lazy, it has no shape before the first forward "
                "pass; run the model once first, or prepare it with an example"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"model: parameter {name!r} is {parameter.dtype}; formats of real numbers are cast "
                "and mastered here: store it as two real parameters"
            )
