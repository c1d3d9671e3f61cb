"""The dtype map of a model: each module's storage format, compute format, and why.

The map is the policy made visible. Its storage formats come from where `Precision.prepare` takes
them (storage/), and its compute formats from where each op's plan does (policy.py), so the table
that is printed cannot differ from what is done.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.precision.module_ops import op_of
from mpframe.precision.policy import Compute, Policy
from mpframe.precision.products.layers import products_of
from mpframe.precision.storage.reads import Read, Reads
from mpframe.precision.storage.storage import formats_of
from mpframe.tree import dtype_name

_HEAD = ("module", "type", "weights", "computes in", "why")
_PRODUCTS = "products"  # The column is there if there are products below 16 bits.


@dataclass(frozen=True)
class Row:
    """One module of the map.

    Attributes:
        module: qualified name; empty for the model itself.
        kind: class name.
        storage: format of the module's own parameters, of most of their numbers if they differ;
            None if it has none.
        compute: format the module's op computes in, in words; `-` if it runs no op of its own.
            Of a class that is not torch.nn's, the formats of the ops that read its weights.
        why: the list or the pin that decides; also that a traced step never called the module.
        products: the recipe of its matrix products or convolutions, which of them stay in half, and
            why; `-` if it has none; empty if no recipe is chosen at all.
    """

    module: str
    kind: str
    storage: torch.dtype | None
    compute: str
    why: str
    products: str = ""


def dtype_map(model: nn.Module, policy: Policy, reads: Reads | None = None) -> list[Row]:
    """One row for each module that holds parameters or runs an op, in the model's order.

    Args:
        model: prepared or not.
        policy: what decides.
        reads: what a traced step showed; None: nothing was traced.
    """
    reads = reads or Reads()
    formats = formats_of(model, policy, reads)
    rows = [_row(name, module, policy, formats, reads) for name, module in model.named_modules()]
    return [row for row in rows if row.storage is not None or row.compute != "-"]


def as_table(rows: list[Row]) -> str:
    """The map as an aligned plain-text table, one line a module."""
    cells: list[tuple[str, ...]] = [
        (*_HEAD, _PRODUCTS),
        *(
            (r.module or "(model)", r.kind, _short(r.storage), r.compute, r.why, r.products)
            for r in rows
        ),
    ]
    shown = len(_HEAD) + any(row.products for row in rows)
    cells = [row[:shown] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _row(
    name: str,
    module: nn.Module,
    policy: Policy,
    formats: Mapping[nn.Parameter, torch.dtype],
    reads: Reads,
) -> Row:
    own = list(module.parameters(recurse=False))
    sizes: Counter[torch.dtype] = Counter()
    for parameter in own:
        sizes[formats[parameter]] += 1 if is_lazy(parameter) else parameter.numel()
    storage = max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=None)
    readers = reads.by(own)
    compute, why = _compute_and_why(name, op_of(module), policy, readers)
    if reads.called and name not in reads.called and not readers:
        why += ", never called"
    products = ""
    if policy.recipes:
        others = [(read.op, read.pin(policy)) for read in readers]
        products = products_of(name, module, op_of(module), others, policy)
    return Row(name, type(module).__name__, storage, compute, why, products)


def _compute_and_why(
    name: str, op: str | None, policy: Policy, readers: Sequence[Read]
) -> tuple[str, str]:
    if policy.mode == "fp32":
        return ("float32" if op else "-"), "dtype.mode=fp32"
    pin = policy.format_pin_of(name)
    why = f"ops.modules[{pin[0]!r}]={pin[1]}" if pin else ""
    if op is None:
        readers = sorted(readers, key=lambda read: not read.in_half(policy))
        computes = [_in_words(read.compute(policy), policy) for read in readers]
        reasons = why or _joined(list_reason(read.op, policy) for read in readers)
        return _joined(computes) or "-", reasons or "no op of torch.nn: fp32 weights"
    compute = policy.compute_of(op, pin[1] if pin else None)
    others = [read for read in readers if compute is Compute.HALF and not read.in_half(policy)]
    why = why or _joined([list_reason(op, policy), *(f"weights read by {r.op}" for r in others)])
    return _in_words(compute, policy), why


def _in_words(compute: Compute, policy: Policy) -> str:
    return {Compute.HALF: policy.half, Compute.FP32: "float32"}.get(compute, compute.value)


def _joined(words: Iterable[str]) -> str:
    """Each word once, at most three."""
    different = list(dict.fromkeys(words))
    return ", ".join(different[:3]) + ", ..." * (len(different) > 3)


def list_reason(op: str, policy: Policy) -> str:
    """Which list decides about an op."""
    if policy.ops.empty:
        return "ops=none: no casts"
    held_by = policy.ops.list_of(op)
    return f"{op or 'a kernel'} is in no list" if held_by == "none" else f"{op} in ops.{held_by}"


def _short(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else dtype_name(dtype)
