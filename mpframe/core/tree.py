"""Tensors in a batch, or in the arguments and results of a call: found and replaced at any depth.

Covers tuples (also named ones), lists, dicts, dataclasses and `UserDict`s.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The 16-bit formats that a run can use, by their names in options."""
HALF = tuple(HALVES.values())
APPLE = frozenset({"mps"})  # the type of device
_SIMPLE = frozenset({int, float, complex, str, bool, type(None)})


def dtype_name(dtype: torch.dtype) -> str:
    """Return a format's name in options, e.g. `float16`."""
    return str(dtype).removeprefix("torch.")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def host_waits_for(device: torch.device) -> bool:
    """Return whether a read from `device` costs: all but a CPU's do, and it ends a recording."""
    return device.type != "cpu" or torch.compiler.is_compiling()


def is_apple(device: torch.device) -> bool:
    """Return whether `device` has no float64, and fused optimizers that ignore `found_inf`."""
    return device.type in APPLE


def widest(device: torch.device) -> torch.dtype:
    """Return the format of counts and their sums: float64, or float32 on Apple's GPUs."""
    return torch.float32 if is_apple(device) else torch.float64


def not_finite(magnitude: Tensor) -> Tensor:
    """Return whether a magnitude (>= 0, or nan) is inf or nan, in two kernels."""
    return ~(magnitude < torch.inf)


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Yield every tensor in `node`, depth first."""
    if isinstance(node, Tensor):
        yield node
    else:
        for item in node if isinstance(node, (tuple, list)) else fields_of(node).values():
            yield from tensors_in(item)


def to_fp32(node: Any) -> Any:
    """Return `node` with every half tensor in fp32."""
    if isinstance(node, Tensor):
        return node.float() if node.dtype in HALF else node
    return map_tensors(to_fp32, node)


def is_simple(node: Any) -> bool:
    """Return whether `node` is a number or a word, or a tuple or list of them: a quick test."""
    kind = type(node)
    return kind in _SIMPLE or (kind in (tuple, list) and _SIMPLE.issuperset(map(type, node)))


def map_tensors(change: Callable[[Tensor], Tensor], node: Any) -> Any:
    """Return `node` with each tensor replaced by `change(tensor)`, in containers of their kind."""
    if isinstance(node, Tensor):
        return change(node)
    if is_simple(node):
        return node
    if isinstance(node, (tuple, list)) and not hasattr(node, "_fields"):
        return type(node)([map_tensors(change, item) for item in node])
    fields = {name: map_tensors(change, item) for name, item in fields_of(node).items()}
    return with_fields(node, fields) if fields else node


def call_with(change: Callable[[Tensor], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with each tensor in its arguments replaced by `change(tensor)`."""
    changed = [map_tensors(change, value) for value in args]
    if not kwargs:
        return func(*changed)
    return func(*changed, **{name: map_tensors(change, value) for name, value in kwargs.items()})


def fields_of(node: Any) -> dict[Any, Any]:
    """Return the items of a named tuple, a dict or a dataclass by name, or an empty dict."""
    if isinstance(node, tuple):
        fields = dict(zip(getattr(node, "_fields", ()), node, strict=False))
        if isinstance(node, PackedSequence):
            del fields["batch_sizes"]  # It stays on the CPU.
        return fields
    if _is_dict(node):
        return dict(node)
    if hasattr(type(node), "__dataclass_fields__"):  # An instance, not a class.
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {}


def with_fields(node: Any, fields: dict[Any, Any]) -> Any:
    """Return a copy of a named tuple, a dict or a dataclass with these `fields`."""
    if type(node) is dict:
        return fields
    if hasattr(node, "_fields"):
        return node._replace(**fields)
    changed = copy.copy(node)
    for name, item in fields.items():
        if _is_dict(node):
            changed[name] = item
        else:
            object.__setattr__(changed, name, item)  # Frozen ones as well: the copy is new.
    return changed


def _is_dict(node: Any) -> bool:
    # UserDict is an abstract class, which takes four times as long to ask.
    return isinstance(node, dict) or (type(node) not in _SIMPLE and isinstance(node, UserDict))
