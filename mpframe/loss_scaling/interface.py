"""The interface of a loss scaler: it gives the scale, and learns from each step's gradients."""

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor


class LossScaler(Protocol):
    """A state machine that chooses the loss scale and lives on the device.

    `update` is called once per step with the largest gradient of that step. It must not wait for
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
        """True until `start_from` has been called, if a probe was asked for."""

    def start_from(self, amax: Tensor) -> None:
        """Choose the first scale for gradients whose largest magnitude is `amax` (0-d float32)."""


def scale_of(scaler: LossScaler | None) -> Tensor | float:
    """What a loss is multiplied by; 1 if it is not scaled."""
    return 1.0 if scaler is None else scaler.scale


def name_of(scaler: LossScaler | None) -> str:
    """`static`, `Backoff`, `LogMax`, `none`, or the class of a user's scaler."""
    return "none" if scaler is None else str(getattr(scaler, "kind", type(scaler).__name__))


def wants_probe(scaler: object) -> TypeGuard[Probed]:
    """True if `scaler` is still to take its first scale from a probe."""
    return isinstance(scaler, Probed) and scaler.wants_probe
