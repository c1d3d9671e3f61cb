"""The policy made visible: a row for each module with storage format, compute format, and why.

It takes storage formats from storage.py, like `Precision.prepare`, and compute formats from
policy.py, like each op's handler, so the table cannot differ from the run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.core.tree import dtype_name
from mpframe.files.text import align, few
from mpframe.precision.op_lists import WITH_STATISTICS
from mpframe.precision.policy import Compute, Policy
from mpframe.precision.precision import Precision
from mpframe.precision.storage import formats_of, op_of
from mpframe.precision.trace import Use

_HEAD = ("module", "type", "weights", "computes in", "why", "products")
_SHOWN = 4  # Reasons for weights that stay fp32.


@dataclass(frozen=True)
class Row:
    """One module of the map."""

    module: str  # its qualified name, empty for the model itself
    kind: str  # its class
    storage: torch.dtype | None  # of most numbers in its own parameters, if it has any
    # In words, or `-` if it runs no op. For a class that is not torch.nn's, of the ops that read
    # its weights.
    compute: str
    why: str  # the list or the pin that decides, and whether a traced step never called it
    # The recipe of its products, and which of them stay in half and why, or `-` if it has none.
    # Empty if no recipe is chosen at all.
    products: str = ""


def dtype_map(precision: Precision, model: nn.Module) -> list[Row]:
    """Return a row for each module that holds parameters or runs an op, in the model's order."""
    policy, uses = precision.policy, precision.uses(model)
    formats = formats_of(model, policy, uses)
    rows = []
    for name, module in model.named_modules():
        op, parameters = op_of(module), list(module.parameters(recurse=False))
        sizes: Counter[torch.dtype] = Counter()
        for parameter in parameters:
            sizes[formats[parameter]] += 1 if is_lazy(parameter) else parameter.numel()
        storage = max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=None)
        users = sorted({use for weight in parameters for use in uses.by_weight.get(weight, ())})
        compute, why = _compute_and_why(name, op, policy, users)
        if uses.called and name not in uses.called and not users:
            why += ", never called"
        readers = [(use.op, use.pin(policy)) for use in users]
        said = (handler.describe(name, module, op, readers) for handler in precision.op_handlers)
        products = "; ".join(filter(None, said))
        kind = type(module).__name__.removeprefix("FSDP")
        if storage is not None or compute != "-":
            rows.append(Row(name, kind, storage, compute, why, products))
    return rows


def fold(rows: Iterable[Row]) -> list[Row]:
    """Join rows that differ in one number of their module's name: `layers.0-11.query`.

    The last numbers are joined first, so that equal blocks of equal blocks become one.
    """
    named = [(row.module.split("."), replace(row, module="")) for row in rows]
    for place in reversed(range(max((len(parts) for parts, _ in named), default=0))):
        joined: dict[object, list[int]] = {}
        for number, (parts, row) in enumerate(named):
            numbered = len(parts) > place and parts[place].isdigit()
            others = (*parts[:place], None, *parts[place + 1 :], row)
            joined.setdefault(others if numbered else number, []).append(number)
        named = [_joined([named[n] for n in numbers], place) for numbers in joined.values()]
    return [replace(row, module=".".join(parts)) for parts, row in named]


def _joined(named: list[tuple[list[str], Row]], place: int) -> tuple[list[str], Row]:
    parts, row = named[0]
    if len(named) == 1:
        return parts, row
    numbers = sorted(int(parts[place]) for parts, _ in named)
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends]
    return [*parts[:place], ",".join(words), *parts[place + 1 :]], row


def as_table(rows: list[Row]) -> str:
    head = _HEAD if any(row.products for row in rows) else _HEAD[:-1]
    cells: list[Sequence[str]] = [head]
    for row in rows:
        stored = "-" if row.storage is None else dtype_name(row.storage)
        name = row.module or "(model)"
        cells.append((name, row.kind, stored, row.compute, row.why, row.products)[: len(head)])
    rule = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
    return align([cells[0], rule, *cells[1:]])


def describe(precision: Precision, model: nn.Module, *, folded: bool = False) -> str:
    """Return the map as a table, the recipes in it, and in `mixed` which weights stay fp32."""
    policy, rows = precision.policy, dtype_map(precision, model)
    lines = [as_table(fold(rows) if folded else rows), *map(str, policy.recipes.values())]
    if policy.stores_by_op:
        lines += _fp32_share(precision, model, rows)
    return "\n".join(lines)


def _fp32_share(precision: Precision, model: nn.Module, rows: Sequence[Row]) -> list[str]:
    """Return the share of weights in fp32, then a line for each reason, the weightiest first."""
    formats = formats_of(model, precision.policy, precision.uses(model))
    reasons = {row.module: row.why for row in rows}
    parts: dict[str, Counter[str]] = {}
    total = 0
    for name, parameter in model.named_parameters():  # A shared weight counts for the first module.
        if not is_lazy(parameter):
            total += parameter.numel()
            if formats[parameter] == torch.float32:
                module = name.rpartition(".")[0]
                parts.setdefault(reasons[module], Counter())[module] += parameter.numel()
    share = _percent(sum(sizes.total() for sizes in parts.values()), total)
    lines = [f"float32: {share} of {total:,} weights"]
    for reason, sizes in sorted(parts.items(), key=lambda part: -part[1].total())[:_SHOWN]:
        modules = [name for name, _ in sizes.most_common()]
        where, first = few([name or "(model)" for name in modules], 1), modules[0]
        lines.append(f"  {_percent(sizes.total(), total)}: {reason}: {where}")
        may_be_half = op_of(model.get_submodule(first)) not in WITH_STATISTICS
        if may_be_half and not precision.policy.format_pin_of(first):
            lines[-1] += f"; half with ops.modules[{first or '*'!r}]=half"
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"


def _compute_and_why(
    name: str, op: str | None, policy: Policy, users: Sequence[Use]
) -> tuple[str, str]:
    if policy.mode == "fp32":
        return ("float32" if op else "-"), "dtype.mode=fp32"
    pin = policy.format_pin_of(name)
    why = f"ops.modules[{pin[0]!r}]={pin[1]}" if pin else ""
    if op is None:
        users = sorted(users, key=lambda use: not use.in_half(policy))
        computes = [_in_words(use.compute(policy), policy) for use in users]
        reasons = why or _join(_list_reason(use.op, policy) for use in users)
        return _join(computes) or "-", reasons or "no op of torch.nn: fp32 weights"
    compute = policy.compute_of(op, pin[1] if pin else None)
    others = [use for use in users if compute is Compute.HALF and not use.in_half(policy)]
    decides = [_list_reason(op, policy), *(f"weights read by {use.op}" for use in others)]
    why = why or _join(decides)
    return _in_words(compute, policy), why


def _in_words(compute: Compute, policy: Policy) -> str:
    return {Compute.HALF: policy.half, Compute.FP32: "float32"}.get(compute, compute.value)


def _join(words: Iterable[str]) -> str:
    """Join each word once, at most three."""
    different = list(dict.fromkeys(words))
    return ", ".join(different[:3]) + ", ..." * (len(different) > 3)


def _list_reason(op: str, policy: Policy) -> str:
    if policy.ops.empty:
        return "ops=none: no casts"
    held_by = policy.ops.list_of(op)
    return f"{op or 'a kernel'} is in no list" if held_by == "none" else f"{op} in ops.{held_by}"
