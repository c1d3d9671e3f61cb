"""Which share of the weights stays in fp32 if the mode stores weights in half, and why."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.precision.dtype_map import list_reason
from mpframe.precision.module_ops import op_of
from mpframe.precision.op_lists import WITH_STATISTICS
from mpframe.precision.policy import Policy
from mpframe.precision.storage.reads import Reads
from mpframe.precision.storage.storage import formats_of, wanted_by

_SHOWN = 4


def fp32_share(model: nn.Module, policy: Policy, reads: Reads) -> list[str]:
    """The share of all weights, then a line for each reason, the weightiest first.

    Args:
        model: prepared or not.
        policy: one that stores weights by their ops.
        reads: what a traced step showed.
    """
    parts: dict[str, dict[str, int]] = {}
    for name, module, parameter in _fp32_weights(model, policy, reads):
        modules = parts.setdefault(_reason(name, module, parameter, policy, reads), {})
        modules[name] = modules.get(name, 0) + parameter.numel()
    sizes = {why: sum(modules.values()) for why, modules in parts.items()}
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    lines = [f"float32: {_percent(sum(sizes.values()), total)} of {total:,} weights"]
    for why in sorted(parts, key=lambda why: -sizes[why])[:_SHOWN]:
        largest = max(parts[why], key=parts[why].__getitem__)
        more = f" and {len(parts[why]) - 1} more" if len(parts[why]) > 1 else ""
        way = "" if why.startswith("uncast ") else _way_out(model, largest, policy)
        where = f"{largest or '(model)'}{more}{way}"
        lines.append(f"  {_percent(sizes[why], total)}: {why}: {where}")
    return lines


def _fp32_weights(
    model: nn.Module, policy: Policy, reads: Reads
) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """Each weight stored in fp32, once, with the first of its modules that wants it so."""
    formats = formats_of(model, policy, reads)
    found: dict[nn.Parameter, tuple[str, nn.Module, nn.Parameter]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            wanted = wanted_by(name, module, policy, reads.of.get(parameter))
            if formats[parameter] == wanted == torch.float32 and not is_lazy(parameter):
                found.setdefault(parameter, (name, module, parameter))
    return list(found.values())


def _reason(
    name: str, module: nn.Module, parameter: nn.Parameter, policy: Policy, reads: Reads
) -> str:
    pin, op = policy.format_pin_of(name), op_of(module)
    if pin is not None and pin[1] == "fp32":
        return f"ops.modules[{pin[0]!r}]=fp32"
    others = [read.op for read in reads.by([parameter]) if not read.in_half(policy)]
    decides = others[0] if others else op
    reason = "no op of torch.nn" if decides is None else list_reason(decides, policy)
    never = reads.called and name not in reads.called and parameter not in reads.of
    return f"{reason}, never called" if never else reason


def _way_out(model: nn.Module, name: str, policy: Policy) -> str:
    """The pin that stores the module's weights in half, if one does."""
    if policy.format_pin_of(name) or op_of(model.get_submodule(name)) in WITH_STATISTICS:
        return ""
    return f"; half with ops.modules[{name or '*'!r}]=half"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"
