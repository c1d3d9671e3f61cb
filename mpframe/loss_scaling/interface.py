"""The interface of a loss scaler: it gives the scale, and learns from each step's gradients."""

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from mpframe.loss_scaling.no_scaling import NoScaling


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
"""One scaler, one for each of several losses by name, or none, which is `NoScaling`."""


@runtime_checkable
class Probed(Protocol):
    """A scaler whose first scale may come from a backward pass made before step 1."""

    @property
    def wants_probe(self) -> bool:
        """True until `start_from` has been called, if a probe was asked for."""

    def start_from(self, amax: Tensor) -> None:
        """Choose the first scale for gradients whose largest magnitude is `amax` (0-d float32)."""


def scale_of(scaler: LossScaler | None) -> Tensor | float:
    """What gradients are divided by; the number 1 if the loss is not scaled: no kernel runs."""
    return 1.0 if scaler is None or isinstance(scaler, NoScaling) else scaler.scale


def name_of(scaler: LossScaler) -> str:
    """`static`, `Backoff`, `LogMax`, `none`, or the class of a user's scaler."""
    return str(getattr(scaler, "kind", type(scaler).__name__))


def scalers_by_name(scaler: Scaling) -> dict[str, LossScaler]:
    """The scalers by the name of their loss, "" if it is the only one or shared; no `NoScaling`."""
    named = scaler if isinstance(scaler, Mapping) else {"": scaler}
    return {n: own for n, own in named.items() if own and not isinstance(own, NoScaling)}


def wants_probe(scaler: object) -> TypeGuard[Probed]:
    """True if `scaler` is still to take its first scale from a probe."""
    return isinstance(scaler, Probed) and scaler.wants_probe
