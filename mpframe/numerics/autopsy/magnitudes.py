"""Tensors as a few numbers: the largest finite magnitude, and whether a value is not finite."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.tree import tensors_in

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Magnitudes:
    """The magnitudes of some tensors together.

    Attributes:
        largest: the largest finite |x|; 0 if there is none.
        infinite, nan: whether any x is.
    """

    largest: float = 0.0
    infinite: bool = False
    nan: bool = False

    @property
    def finite(self) -> bool:
        """True if every x is finite."""
        return not (self.infinite or self.nan)

    def __or__(self, other: "Magnitudes") -> "Magnitudes":
        return Magnitudes(
            max(self.largest, other.largest), self.infinite or other.infinite, self.nan or other.nan
        )


def magnitudes_of(node: object) -> Magnitudes:
    """Of every floating tensor in `node`, at any depth; waits for the device."""
    found = Magnitudes()
    for values in floats_in(node):
        found |= _of(values)
    return found


def floats_in(node: object) -> Iterable[Tensor]:
    """The values of every floating tensor in `node` that has any; of sparse ones the entries."""
    for tensor in tensors_in(node):
        values = tensor.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if values.dtype in _FLOATS and values.numel():
            yield values


def bad_rows(node: object, rows: int) -> list[int]:
    """The places along dimension 0, of length `rows`, at which a value is inf or NaN."""
    bad: set[int] = set()
    for values in floats_in(node):
        if values.dim() and len(values) == rows:
            flat = ~torch.isfinite(values).reshape(rows, -1).all(dim=1)
            bad.update(flat.nonzero().flatten().tolist())
    return sorted(bad)


def _of(values: Tensor) -> Magnitudes:
    size = values.abs()
    largest = size.max()
    if bool(torch.isfinite(largest)):
        return Magnitudes(float(largest))
    nan, infinite = bool(size.isnan().any()), bool(size.isinf().any())
    return Magnitudes(float(size.nan_to_num(0.0, 0.0, 0.0).max()), infinite, nan)
