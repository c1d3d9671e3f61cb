"""How weights are stored: each in the format that it is computed with.

In `mixed` a weight is half if every op that reads it computes in half, as a traced step shows
(reads.py); fp32 if any other does. Of a weight that no trace has seen read, the module's class
tells the op: half for a layer of torch.nn whose op is in `allow`. A pin of its module comes before
both, and without any lists all weights are half.

A tied weight takes the widest format that any of its modules wants. What an op writes into,
BatchNorm's running statistics, stays in fp32, and so do the weights beside it; with no lists at all
they are half too, as on that rung nothing is protected.
"""

from collections.abc import Set

import torch
from torch import Tensor, nn

from mpframe.distributed.shards import is_sharded
from mpframe.errors import ConfigError
from mpframe.optim.masters.master import exact_value
from mpframe.precision.module_ops import op_of
from mpframe.precision.op_lists import WITH_STATISTICS
from mpframe.precision.policy import CASTABLE, Policy
from mpframe.precision.storage.reads import Read, Reads
from mpframe.tree import HALF


def formats_of(
    model: nn.Module, policy: Policy, reads: Reads | None = None
) -> dict[nn.Parameter, torch.dtype]:
    """The format each parameter is stored in; for one that is never cast, its own."""
    of = {} if reads is None else reads.of
    formats: dict[nn.Parameter, torch.dtype] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            wanted = wanted_by(name, module, policy, of.get(parameter))
            tied = formats.get(parameter, wanted)
            widest = wanted if tied == wanted else torch.float32
            formats[parameter] = widest if parameter.dtype in CASTABLE else parameter.dtype
    return formats


@torch.no_grad()
def store(model: nn.Module, policy: Policy, reads: Reads | None = None) -> dict[Tensor, Tensor]:
    """Bring every weight into its format, in place.

    A weight beyond the half range is stored at the range's end. One that is half already is stored
    from its master, if it has one. One that is divided among ranks stays fp32: it is gathered so.

    Returns:
        The fp32 values from before, of the weights that were rounded.

    Raises:
        ConfigError: a parameter is complex; nothing has been changed.
    """
    _refuse_complex(model)
    before: dict[Tensor, Tensor] = {}
    for parameter, dtype in formats_of(model, policy, reads).items():
        if parameter.dtype != dtype and not is_sharded(parameter):
            exact = exact_value(parameter)
            _restore_as(parameter, dtype, parameter.data.float() if exact is None else exact)
            if exact is not None and dtype in HALF:
                before[parameter] = exact
    for name, module in model.named_modules():
        _store_buffers(module, wanted_by(name, module, policy), policy)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return before


def wanted_by(
    name: str, module: nn.Module, policy: Policy, reads: Set[Read] | None = None
) -> torch.dtype:
    """The format in which `module` wants one of its own floating parameters, read by `reads`."""
    op, pin = op_of(module), policy.format_pin_of(name)
    if pin is not None:
        half = pin[1] == "half"
    elif reads is not None and not policy.ops.empty:
        half = all(read.in_half(policy) for read in reads)
    else:
        half = policy.ops.empty or (op is not None and policy.ops.list_of(op) == "allow")
    if op in WITH_STATISTICS and not policy.ops.empty:
        half = False
    return policy.half_dtype if half and policy.mode == "mixed" else torch.float32


def _restore_as(parameter: nn.Parameter, dtype: torch.dtype, values: Tensor) -> None:
    limit = torch.finfo(dtype).max
    parameter.data = values.clamp(-limit, limit).to(dtype)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(dtype)


def _store_buffers(module: nn.Module, wanted: torch.dtype, policy: Policy) -> None:
    if op_of(module) in WITH_STATISTICS or (policy.mode == "mixed" and policy.ops.empty):
        for buffer in module.buffers(recurse=False):
            if buffer.dtype in CASTABLE:
                buffer.data = buffer.data.to(wanted)


def _refuse_complex(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"model: parameter {name!r} is {parameter.dtype}; formats of real numbers are cast "
                "and mastered here: store it as two real parameters"
            )
