"""Tensors of which each rank holds a part: some of the rows, as torch's DTensor.

Rank r of n holds the rows r c to (r + 1) c with c = ceil(rows / n); the last parts may be smaller,
or empty. A tensor that is not sharded is its own part, so nobody has to ask which kind it is.
"""

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    kind: Any = sys.modules.get("torch.distributed.tensor")  # Without it there is none.
    return kind is not None and isinstance(tensor, kind.DTensor)


def part_of(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the memory they have; of any other tensor all."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    own: Tensor = sharded.to_local()
    return own


def part_for(place: Tensor, values: Tensor) -> Tensor:
    """The rows of `values` that belong into the memory of `place`.

    Args:
        place: sharded or not.
        values: of its shape; whole, or sharded as `place` is.
    """
    if is_sharded(values) or not is_sharded(place):
        return part_of(values)
    mesh = as_any(place).device_mesh
    rows = rows_of_a_part(len(values), mesh.size())
    return values[rows * mesh.get_local_rank() :][:rows]


def sharded_as(place: Tensor, part: Tensor) -> Tensor:
    """A part as a tensor sharded in the way of `place`, sharing its memory."""
    if not is_sharded(place):
        return part
    from torch.distributed.tensor import DTensor

    like = as_any(place)
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=place.shape,
        stride=place.stride(),
    )


def address_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins: the same for one that several names share; 0: nowhere."""
    if is_sharded(tensor):  # The memory of an empty part is there, too.
        return part_of(tensor).untyped_storage().data_ptr()
    return tensor.data_ptr()


def rows_of_a_part(rows: int, ranks: int) -> int:
    """How many rows a rank holds, but for the last ones."""
    return -(-rows // ranks)


def as_any(tensor: Tensor) -> Any:
    """The tensor, whose class torch's types do not know."""
    return tensor
