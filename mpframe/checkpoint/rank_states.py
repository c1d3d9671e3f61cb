"""What each rank of a run has of its own, in the checkpoint that rank 0 writes.

All else is the same on all ranks. A rank of its own number goes on with its own.
"""

import io
from typing import Any

import torch

from mpframe.distributed.world import World

OTHER_RANKS = "other_ranks"
"""The entry of a checkpoint's state: a list of the states of ranks 1, 2, ..."""


def of_other_ranks(world: World, own: dict[str, Any]) -> list[dict[str, Any]]:
    """On rank 0 the states of all others in their order; elsewhere an empty list.

    Args:
        world: all its ranks call this.
        own: of this rank: tensors, numbers, strings, lists, dicts.
    """
    if world.size == 1:
        return []
    file = io.BytesIO()  # pickle could not read numpy's random state again, a tensor of uint32.
    torch.save(own, file)
    sent = world.gather_object(file.getvalue())[1:]
    return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=True) for one in sent]


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """What a checkpoint's state holds for a rank > 0; None if it was made with fewer ranks."""
    others = state.get(OTHER_RANKS, [])
    return others[rank - 1] if rank <= len(others) else None
