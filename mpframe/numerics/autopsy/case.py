"""A training step to examine: everything that its forward and backward pass depend on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpframe.checkpoint.state import RandomState
from mpframe.objectives import samples_in
from mpframe.precision import Precision
from mpframe.training.named_objective import NamedObjective
from mpframe.training.trainer import AnyOptimizer

Batch = Any


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: prepared by `precision`, holding the weights and buffers the step began with.
        optimizer: has the fp32 masters of the weights.
        precision: the dtype mode of the run.
        objectives: the losses, in their order; their scalers are not used.
        batches: each micro-batch as the objectives take it, on the model's device.
        scales: the loss scale of each objective, by its name.
        floors: the least scale of each scaler that has a floor, by the name of its loss.
        scaling: `static`, `Backoff`, `LogMax`, or `none`.
        samples: the dataset's indices of each micro-batch's samples; empty if unknown.
        random: the states of torch's generators before the step; None: as they are now.
        first_loss: the unscaled loss of the run's first steps, to tell divergence; None: unknown.
        skipped: the objectives whose step was skipped; None: all count.
    """

    model: nn.Module
    optimizer: AnyOptimizer
    precision: Precision
    objectives: Sequence[NamedObjective]
    batches: Sequence[Batch]
    scales: Mapping[str, float]
    floors: Mapping[str, float] = field(default_factory=dict)
    scaling: str = "none"
    samples: Sequence[Sequence[int]] = ()
    random: RandomState | None = None
    first_loss: float | None = None
    skipped: frozenset[str] | None = None

    def count(self, number: int) -> int:
        """How many samples a micro-batch holds."""
        known = self.samples[number] if number < len(self.samples) else ()
        return len(known) or samples_in(self.batches[number])

    @property
    def half(self) -> torch.dtype:
        """The run's 16-bit format; float32 in an fp32 run, which has no narrower limit."""
        policy = self.precision.policy
        return torch.float32 if policy.mode == "fp32" else policy.half_dtype

    @property
    def room_below(self) -> int:
        """Octaves down to the floor, or to 1 if the floor is higher: a user can lower it."""
        lowest = {name: min(1.0, self.floors.get(name, 1.0)) for name in self.scales}
        rooms = (max(0.0, math.log2(scale / lowest[name])) for name, scale in self.scales.items())
        return int(min(rooms, default=0.0))
