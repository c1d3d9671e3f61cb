"""What the parts of one training step say to each other.

A leaf: the optimizer wrapper, the scalers and the trainer all speak these words, and none of them
needs to import another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor


class LossScaler(Protocol):
    """A state machine that chooses the loss scale and lives on the device.

    `update` is called once per step with what that step's gradients were; it must not wait for
    the device (no `.item()`, no `bool(tensor)`).
    """

    @property
    def scale(self) -> Tensor:
        """The present scale: 0-d, float32, finite, > 0, on the scaler's device."""

    def update(self, amax: Tensor) -> None:
        """Tell the scaler the largest |unscaled gradient| of a step.

        Args:
            amax: 0-d float32, >= 0; inf or nan says that the step overflowed.
        """

    def to(self, device: torch.device | str) -> Self:
        """Move the state to `device`, in place; returns self."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the scaler's future: plain tensors and numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` bit for bit.

        Raises:
            CheckpointError: the state was made by another kind of scaler.
        """


Scaling = LossScaler | Mapping[str, LossScaler] | None
"""One scaler, one for each of several losses by name, or none."""


@runtime_checkable
class Probed(Protocol):
    """A scaler whose first scale may come from a backward pass made before step 1."""

    @property
    def wants_probe(self) -> bool:
        """True until `start_from` has been called, where a probe was asked for."""

    def start_from(self, amax: Tensor) -> None:
        """Choose the first scale for gradients whose largest magnitude is `amax` (0-d float32)."""


def scale_of(scaler: LossScaler | None) -> Tensor | float:
    """What a loss is multiplied by; 1 where it is not scaled."""
    return 1.0 if scaler is None else scaler.scale


def wants_probe(scaler: object) -> TypeGuard[Probed]:
    """True where `scaler` is still to take its first scale from a probe."""
    return isinstance(scaler, Probed) and scaler.wants_probe


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Every value stays on the device until somebody reads it.

    Attributes:
        skipped: 0-d bool; True where the gradients were not finite and nothing was changed.
        amax: 0-d float32, the largest |gradient|, unscaled, before clipping; inf on overflow.
        grad_norm: 0-d float32, the global 2-norm of the gradients, unscaled, before clipping.
        scale: 0-d float32, the loss scale this step was computed with.
        dropped: 0-d int64, micro-batches of the step left out because they overflowed; None
            where the step was not accumulated.
        loss: 0-d float32, the unscaled mean loss of the step; None outside the trainer.
        parts: the same of each optimizer, by name, where several share the step; None with one.
            `skipped` is then true where all of them skipped, `amax` the largest, `grad_norm` that
            of all gradients together, `loss` the sum.
    """

    skipped: Tensor
    amax: Tensor
    grad_norm: Tensor
    scale: Tensor
    dropped: Tensor | None = None
    loss: Tensor | None = None
    parts: "Mapping[str, StepResult] | None" = None

    def each(self) -> "Mapping[str, StepResult]":
        """The parts by name; of a step with one optimizer itself, under the empty name."""
        return {"": self} if self.parts is None else self.parts

    def any_skipped(self) -> Tensor:
        """0-d bool: whether any of the parts was skipped."""
        return any_of([part.skipped for part in self.each().values()])


def any_of(verdicts: list[Tensor]) -> Tensor:
    """0-d bool: whether any of some 0-d verdicts is true; of a single one, itself."""
    return verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).any()


def largest(magnitudes: list[Tensor]) -> Tensor:
    """The largest of some 0-d magnitudes, nan where one is nan; of a single one, itself."""
    return magnitudes[0] if len(magnitudes) == 1 else torch.stack(magnitudes).max()
