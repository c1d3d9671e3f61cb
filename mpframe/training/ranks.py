"""The check that all ranks of a run hold the same: before its first step, and at each checkpoint.

Ranks that train together stay the same as long as nobody else writes their weights. If they drift
apart nothing else fails: each goes on with a model of its own, and the average of two models is
none.
"""

from typing import TYPE_CHECKING

import torch

from mpframe.errors import CheckpointError, MpframeError, UserCodeError

if TYPE_CHECKING:
    from mpframe.training.trainer import Trainer


def refuse_other_start(trainer: "Trainer", resume: str) -> None:
    """Refuse ranks that do not begin at the same step with the same weights.

    Args:
        trainer: about to train.
        resume: the option, for the message.

    Raises:
        CheckpointError: they go on from different steps.
        UserCodeError: the model begins otherwise on one of them.
    """
    if trainer.world.size == 1:
        return
    steps = trainer.world.gather_object(trainer.progress.global_step)
    steps = trainer.world.broadcast_object(steps)
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise CheckpointError(
                f"resume={resume}: rank 0 goes on after step {steps[0]}, rank {rank} after step "
                f"{step}; every rank must see the run's folder"
            )
    differs = _first_difference(trainer)
    if differs is not None:
        raise UserCodeError(
            f"model: {differs} before the first step; let it draw random numbers from torch's "
            "global generator, which has the same seed on all"
        )


def refuse_drift(trainer: "Trainer") -> None:
    """Refuse ranks whose weights have drifted apart.

    Raises:
        MpframeError: names a tensor and a rank.
    """
    differs = None if trainer.world.size == 1 else _first_difference(trainer)
    if differs is not None:
        raise MpframeError(
            f"trainer.parallel=ddp: after step {trainer.progress.global_step} {differs}; what "
            "writes the weights, a callback as well, must do the same on all ranks"
        )


@torch.no_grad()
def _first_difference(trainer: "Trainer") -> str | None:
    """A clause on the first tensor that is another one on a rank than on rank 0."""
    named = trainer.weights()
    own = torch.stack([value.double().sum().cpu() for value in named.values()]).tolist()
    sums = trainer.world.broadcast_object(trainer.world.gather_object(own))
    for rank, others in enumerate(sums):
        for name, first, other in zip(named, sums[0], others, strict=True):
            if first != other and not (first != first and other != other):  # nan is no difference.
                return f"{name} is not the same on rank {rank} as on rank 0"
    return None
