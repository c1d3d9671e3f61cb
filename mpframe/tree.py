"""Tensors inside the arguments and results of a call: found, and replaced, at any depth.

Covers what PyTorch's own functions take and give: tuples (named ones too), lists and dicts; and
dataclasses, which models give.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Every tensor in `node`, depth first."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (tuple, list)):
        for item in node:
            yield from tensors_in(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from tensors_in(item)
    elif _is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from tensors_in(getattr(node, field.name))


def widened(node: Any) -> Any:
    """`node` with every half tensor in fp32."""
    return map_tensors(lambda t: t.float() if t.dtype in HALF else t, node)


def map_tensors(change: Callable[[Tensor], Tensor], node: Any) -> Any:
    """`node` with each tensor replaced by `change(tensor)`; containers keep their kind."""
    if isinstance(node, Tensor):
        return change(node)
    if isinstance(node, (tuple, list)):
        items = [map_tensors(change, item) for item in node]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    if isinstance(node, dict):
        changed = {} if type(node) is dict else copy.copy(node)
        for key, item in node.items():
            changed[key] = map_tensors(change, item)
        return changed
    if _is_dataclass(node):
        changed = copy.copy(node)
        for field in dataclasses.fields(node):
            item = map_tensors(change, getattr(node, field.name))
            object.__setattr__(changed, field.name, item)  # Frozen ones, too: the copy is new.
        return changed
    return node


def _is_dataclass(node: Any) -> bool:
    return hasattr(type(node), "__dataclass_fields__")  # of the value: a class itself is none
