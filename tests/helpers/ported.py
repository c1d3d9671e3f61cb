"""What the ported suites share."""

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

INF, NAN = float("inf"), float("nan")


def scales_after(scaler: Any, amaxes: Iterable[float]) -> list[float]:
    """The scale after each of these updates."""
    scales = []
    for amax in amaxes:
        scaler.update(torch.tensor(amax))
        scales.append(scaler.scale.item())
    return scales


def cases(names: Iterable[str], differing: Mapping[str, str]) -> list[Any]:
    """A parameter for each name, marked where it comes out otherwise here."""
    marks = {name: [pytest.mark.differs(why)] for name, why in differing.items()}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def converted(node: Any, first: torch.dtype, others: torch.dtype) -> Any:
    """`node` with new leaves: the first of its fp32 tensors in a format, the others in another."""
    formats = chain([first], repeat(others))

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.float32:
            return leaf
        return leaf.detach().clone().to(next(formats)).requires_grad_(leaf.requires_grad)

    return tree_map(convert, node)


def backward_of(result: Any) -> None:
    """A backward pass from all that has a gradient."""
    plain = tuple(result) if isinstance(result, tuple) else result  # no pytree: a named tuple
    leaves = [t for t in tree_leaves(plain) if isinstance(t, Tensor) and t.requires_grad]
    if leaves:
        torch.stack([t.to_dense().abs().float().sum() for t in leaves]).sum().backward()
