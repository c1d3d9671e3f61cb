"""The dtype map of a model: each module's storage format, compute format, and why.

The map is the policy made visible, and also what storage goes by: `Precision.prepare` stores each
weight in the format its row says, so the table that is printed cannot differ from what is done.
"""

from dataclasses import dataclass

import torch
from torch import nn

from mpframe.precision.module_ops import op_of
from mpframe.precision.policy import Compute, Policy

_HEAD = ("module", "type", "weights", "computes in", "why")


@dataclass(frozen=True)
class Row:
    """One module of the map.

    Attributes:
        module: qualified name; empty for the model itself.
        kind: class name.
        storage: format of the module's own floating parameters; None where it has none.
        compute: format the module's op computes in, in words; `-` where it runs no op of its own.
        why: the list or the pin that decides.
    """

    module: str
    kind: str
    storage: torch.dtype | None
    compute: str
    why: str


def dtype_map(model: nn.Module, policy: Policy) -> list[Row]:
    """A row for every module that holds parameters or runs an op, in the model's order."""
    rows = [_row(name, module, policy) for name, module in model.named_modules()]
    return [row for row in rows if row.storage is not None or row.compute != "-"]


def storage_of(name: str, module: nn.Module, policy: Policy) -> torch.dtype:
    """The format in which the floating parameters of `module` are stored.

    Half where the mode is mixed and the module is pinned to half, its op is in `allow`, or there
    are no lists at all; fp32 otherwise.
    """
    if policy.mode != "mixed":
        return torch.float32
    pin = policy.pin_of(name)
    op = op_of(module)
    half = policy.ops.empty or (op is not None and policy.ops.list_of(op) == "allow")
    if pin is not None:
        half = pin[1] == "half"
    return policy.half_dtype if half else torch.float32


def as_table(rows: list[Row]) -> str:
    """The map as an aligned plain-text table, one line a module."""
    cells = [
        _HEAD,
        *((r.module or "(model)", r.kind, _short(r.storage), r.compute, r.why) for r in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, module: nn.Module, policy: Policy) -> Row:
    own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
    storage = storage_of(name, module, policy) if own else None
    compute, why = _compute_and_why(name, op_of(module), policy)
    return Row(name, type(module).__name__, storage, compute, why)


def _compute_and_why(name: str, op: str | None, policy: Policy) -> tuple[str, str]:
    if policy.mode == "fp32":
        return ("float32" if op else "-"), "dtype.mode=fp32"
    pin = policy.pin_of(name)
    why = f"ops.modules[{pin[0]!r}]={pin[1]}" if pin else ""
    if op is None:
        return "-", why or "no op of torch.nn: fp32 weights"
    compute = policy.compute_of(op, pin[1] if pin else None)
    words = {Compute.HALF: policy.half, Compute.FP32: "float32"}.get(compute, compute.value)
    return words, why or _list_reason(op, policy)


def _list_reason(op: str, policy: Policy) -> str:
    if policy.ops.empty:
        return "ops=none: no casts"
    held_by = policy.ops.list_of(op)
    return f"{op} is in no list" if held_by == "none" else f"{op} in ops.{held_by}"


def _short(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")
