"""The check that all ranks hold the same, before the first step and at each checkpoint.

Ranks stay the same as long as nothing else writes their weights. If they drift apart, nothing else
fails: each trains its own model, and their average means nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpframe.core.comm import Comm, cuts_of, is_sharded, part_of
from mpframe.core.errors import CheckpointError, MpframeError, UserCodeError

Weights = Callable[[], Mapping[str, Tensor]]
"""Returns the weights by name, as `Trainer.weights`. A single process never asks for them."""


def refuse_other_start(comm: Comm, step: int, weights: Weights, resume: str) -> None:
    """Raise CheckpointError or UserCodeError if ranks begin at other steps or weights."""
    if comm.size == 1:
        return
    steps = comm.broadcast_object(comm.gather_object(step))
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise CheckpointError(
                f"resume={resume}: rank 0 goes on after step {steps[0]}, rank {rank} after step "
                f"{other}; every rank must see the run's folder"
            )
    refuse_other_weights(comm, sums_of(weights().items()))


def refuse_other_weights(comm: Comm, sums: Mapping[tuple[Any, ...], float]) -> None:
    """Raise UserCodeError with the first weight that differs between ranks before step 1."""
    differs = _first_difference(comm, sums)
    if differs is not None:
        raise UserCodeError(
            f"model: {differs} before the first step; let it draw random numbers from torch's "
            "global generator, which has the same seed on all"
        )


def refuse_drift(comm: Comm, step: int, weights: Weights) -> None:
    """Raise MpframeError with a tensor and a rank whose weights have drifted apart."""
    if comm.size == 1:
        return
    differs = _first_difference(comm, sums_of(weights().items()))
    if differs is not None:
        parallel = "ddp" if comm.sharding is None else "fsdp"
        raise MpframeError(
            f"trainer.parallel={parallel}: after step {step} {differs}; what writes the weights, a "
            "callback as well, must do the same on all ranks"
        )


@torch.no_grad()
def sums_of(named: Iterable[tuple[str, Tensor]]) -> dict[tuple[Any, ...], float]:
    """Return the sum of each tensor, or of this rank's part of it, by its name and its place."""
    return {
        (name, *(cuts_of(value) if is_sharded(value) else ())): float(
            part_of(value).sum(dtype=torch.float64)
        )
        for name, value in named
    }


def _first_difference(comm: Comm, mine: Mapping[tuple[Any, ...], float]) -> str | None:
    """Return a clause on the first tensor, or part, that differs between ranks that hold it."""
    firsts: dict[Any, tuple[int, float]] = {}
    for rank, sums in enumerate(comm.broadcast_object(comm.gather_object(mine))):
        for part, other in sums.items():
            holder, first = firsts.setdefault(part, (rank, other))
            if first != other and not (first != first and other != other):  # nan is no difference.
                return f"{part[0]} is not the same on rank {rank} as on rank {holder}"
    return None
