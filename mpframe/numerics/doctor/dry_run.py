"""A forward pass of the first batch that records what losses are called with."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpframe.objectives import compute
from mpframe.precision.undisturbed import undisturbed
from mpframe.training.loader import Batch
from mpframe.training.trainer import Trainer


@dataclass
class DryRun:
    """What was recorded.

    Attributes:
        probabilities: the input of each binary cross-entropy.
    """

    probabilities: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def dry_run(trainer: Trainer, batch: Batch) -> DryRun:
    """Run the objectives as a step would; the model is left as it was."""
    model, seen = trainer.model, DryRun()
    model.train()
    # Outside the cast block: it sees the arguments of an op after they were cast.
    kept = trainer.precision.undisturbed()
    with undisturbed(model), kept, _Probabilities(seen), trainer.precision.cast():
        for own in trainer.objectives:
            compute(own.objective, model, batch)
    return seen


class _Probabilities(TorchFunctionMode):
    """Records the inputs of binary cross-entropies."""

    def __init__(self, seen: DryRun) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.binary_cross_entropy:
            given = args[0] if args else kwargs["input"]
            self._seen.probabilities.append(given.detach())
        return func(*args, **(kwargs or {}))
