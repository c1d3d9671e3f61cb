"""The place of a process among the ranks, as torchrun tells it by variables of the environment.

    RANK, WORLD_SIZE             which process of how many
    LOCAL_RANK                   which one on this machine: its CUDA device
    MASTER_ADDR, MASTER_PORT     where the ranks find each other

Without them, or with a world size of 1, there is one process. They are read without torch.
"""

import os
from dataclasses import dataclass

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """A process among the others: its rank, how many there are, its number on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def place() -> Place:
    """Return the place of this process, the only one without torchrun."""
    if not all(name in os.environ for name in _VARIABLES):
        return Place()
    rank, size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
    return Place(rank, size, local_rank) if size > 1 else Place()
