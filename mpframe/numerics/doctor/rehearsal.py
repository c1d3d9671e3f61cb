"""One forward pass of the first batch, watched: what a loss is given."""

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
class Rehearsal:
    """What was seen.

    Attributes:
        probabilities: what each binary cross-entropy was given, as it was given.
    """

    probabilities: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def rehearse(trainer: Trainer, batch: Batch) -> Rehearsal:
    """Run the objectives as a step would; the model is left as it was."""
    model, seen = trainer.model, Rehearsal()
    model.train()
    # Outside of the cast: it sees what an op is given after its arguments were cast.
    with undisturbed(model), _Losses(seen), trainer.precision.cast():
        for own in trainer.objectives:
            compute(own.objective, model, batch)
    return seen


class _Losses(TorchFunctionMode):
    """Keeps what binary cross-entropies are given."""

    def __init__(self, seen: Rehearsal) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.binary_cross_entropy:
            given = args[0] if args else kwargs["input"]
            self._seen.probabilities.append(given.detach())
        return func(*args, **(kwargs or {}))
