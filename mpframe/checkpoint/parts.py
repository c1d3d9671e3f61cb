"""A state of which each rank holds parts: each writes its own, and readers put them together.

    state.pt          the state of rank 0, with None where a tensor is divided
    parts_00000.pt    what rank 0 holds of these tensors, by where they stand in the state
    parts_00001.pt    ...

A divided tensor is its parts one after another, so nobody has to know how many ranks wrote them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpframe.checkpoint.untrusted import damaged_if_raising, load_untrusted
from mpframe.distributed.shards import address_of, is_sharded, part_of
from mpframe.errors import CheckpointError

Place = tuple[str | int, ...]
"""The keys and indexes that lead to a value in a state."""
_CODE = "holds code, which is never run; the parts of a checkpoint are tensors"


def divided(state: Any) -> tuple[Any, dict[Place, Tensor]]:
    """A state without its sharded tensors, and copies of this rank's parts of them on the host.

    A tensor that stands in several places has one copy.
    """
    parts: dict[Place, Tensor] = {}
    return _taken_out(state, (), parts, {}), parts


def put_together(state: dict[str, Any], files: Sequence[Path]) -> None:
    """Put whole tensors into a state that was read, in the places of divided ones.

    Args:
        state: what `divided` left.
        files: the parts of all ranks, in their order.

    Raises:
        CheckpointError: a file is damaged, holds something else, or is of another checkpoint.
    """
    ranks = [_read(path) for path in files]
    wholes: dict[tuple[int, ...], Tensor] = {}
    with damaged_if_raising(files[0], "not parts of its checkpoint"):
        for place in ranks[0]:
            parts = [own.pop(place) for own in ranks[1:]]
            parts.insert(0, ranks[0][place])
            key = tuple(part.data_ptr() for part in parts)
            if not any(key) or key not in wholes:
                wholes[key] = torch.cat(parts)
            _put(state, place, wholes[key])
        if any(ranks[1:]):
            raise ValueError("one holds other tensors")


def _taken_out(
    value: Any, place: Place, parts: dict[Place, Tensor], copies: dict[int, Tensor]
) -> Any:
    if isinstance(value, Tensor) and is_sharded(value):
        own = part_of(value)
        memory = address_of(value)
        if not memory or memory not in copies:
            copies[memory] = own.to("cpu", copy=True)
        parts[place] = copies[memory]
        return None
    if isinstance(value, dict):
        return {key: _taken_out(own, (*place, key), parts, copies) for key, own in value.items()}
    if type(value) in (list, tuple):
        kept = (_taken_out(own, (*place, n), parts, copies) for n, own in enumerate(value))
        return type(value)(kept)
    return value


def _put(state: Any, place: Place, whole: Tensor) -> None:
    for key in place[:-1]:
        state = state[key]
    if state[place[-1]] is not None:
        raise ValueError("the state has something in a divided tensor's place")
    state[place[-1]] = whole


def _read(path: Path) -> dict[Place, Tensor]:
    with damaged_if_raising(path, "not a rank's parts"):
        parts = load_untrusted(path, _CODE)
        if not isinstance(parts, dict) or not all(isinstance(v, Tensor) for v in parts.values()):
            raise CheckpointError(f"{path}: holds no rank's parts of a checkpoint; use another one")
        _refuse_bomb(path, parts)
        return parts


def _refuse_bomb(path: Path, parts: Mapping[Place, Tensor]) -> None:
    """Refuse parts that overlap in their file: put together, each takes memory of its own."""
    distinct = {part.data_ptr(): part.nbytes for part in parts.values()}
    if any(part.nbytes != distinct[part.data_ptr()] for part in parts.values()) or (
        sum(distinct.values()) > path.stat().st_size
    ):
        raise CheckpointError(f"{path}: refused, its tensors overlap; use another checkpoint")
