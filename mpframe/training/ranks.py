"""The check that all ranks hold the same, before the first step and at each checkpoint.

Ranks stay the same as long as nothing else writes their weights. If they drift apart, nothing else
fails: each trains its own model, and their average means nothing.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mpframe.core.comm import Comm, is_sharded
from mpframe.core.errors import CheckpointError, MpframeError, UserCodeError
from mpframe.training.trainer import Trainer


def refuse_other_start(trainer: Trainer, resume: str) -> None:
    """Raise CheckpointError or UserCodeError if ranks begin at other steps or weights."""
    if trainer.comm.size == 1:
        return
    steps = trainer.comm.broadcast_object(trainer.comm.gather_object(trainer.progress.global_step))
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise CheckpointError(
                f"resume={resume}: rank 0 goes on after step {steps[0]}, rank {rank} after step "
                f"{step}; every rank must see the run's folder"
            )
    refuse_other_weights(trainer.comm, sums_of(trainer.weights().items()))


def refuse_other_weights(comm: Comm, sums: Mapping[str, float]) -> None:
    """Raise UserCodeError with the first weight that differs between ranks before step 1."""
    differs = _first_difference(comm, sums)
    if differs is not None:
        raise UserCodeError(
            f"model: {differs} before the first step; let it draw random numbers from torch's "
            "global generator, which has the same seed on all"
        )


def refuse_drift(trainer: Trainer) -> None:
    """Raise MpframeError with a tensor and a rank whose weights have drifted apart."""
    if trainer.comm.size == 1:
        return
    differs = _first_difference(trainer.comm, sums_of(trainer.weights().items()))
    if differs is not None:
        raise MpframeError(
            f"trainer.parallel=ddp: after step {trainer.progress.global_step} {differs}; what "
            "writes the weights, a callback as well, must do the same on all ranks"
        )


@torch.no_grad()
def sums_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the sums of the tensors that are alike on all ranks, by name."""
    return {n: float(t.sum(dtype=torch.float64)) for n, t in named if not is_sharded(t)}


def _first_difference(comm: Comm, mine: Mapping[str, float]) -> str | None:
    """Return a clause on the first tensor that is not on a rank as on rank 0, or None."""
    sums = comm.broadcast_object(comm.gather_object([*mine.values()]))
    for rank, others in enumerate(sums):
        for name, first, other in zip(mine, sums[0], others, strict=True):
            if first != other and not (first != first and other != other):  # nan is no difference.
                return f"{name} is not the same on rank {rank} as on rank 0"
    return None
