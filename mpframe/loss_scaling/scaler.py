"""The base of all scalers: a few named 0-d tensors on one device, saved and loaded by name."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mpframe.errors import CheckpointError


class Scaler:
    """Keeps a scaler's state. `update` replaces the tensors and never writes into them.

    So a scale from an earlier step, in a log or in the graph of a loss, keeps its value.

    Args:
        state: the 0-d tensors that decide the scaler's future; `scale` (float32) is one of them.
    """

    kind: ClassVar[str]
    """Its name in summaries and saved states: that of the class, unless the class sets another."""

    def __init_subclass__(cls) -> None:
        """Give the class its `kind`: its own, or its name."""
        cls.kind = cls.__dict__.get("kind", cls.__name__)

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self._wants_probe = False

    @property
    def scale(self) -> Tensor:
        """The present scale: 0-d, float32, finite, > 0, on the scaler's device."""
        return self.state["scale"]

    @property
    def floor(self) -> float:
        """The least scale it may take; a scaler that never moves has its own."""
        return float(self.scale)

    @property
    def wants_probe(self) -> bool:
        """Whether the first scale is to come from a backward pass made before step 1."""
        return self._wants_probe

    def to(self, device: torch.device | str) -> Self:
        """Move the state to `device`, in place; returns self."""
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """The kind of scaler, whether it still waits for a probe, and a copy of every tensor."""
        tensors = {name: tensor.clone() for name, tensor in self.state.items()}
        return {"kind": self.kind, "wants_probe": self._wants_probe, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` bit for bit, on the device this scaler is on.

        The constructor's arguments are options, not state: they stay as they are.

        Raises:
            CheckpointError: `state` was made by another kind of scaler, or an entry is missing,
                of another type or shape, or not finite.
        """
        saved = state.get("kind")
        if saved != self.kind:
            raise CheckpointError(
                f"loss_scaling={self.kind} cannot continue the saved state of {saved}: "
                f"use loss_scaling={saved}, or start a new run from the saved weights"
            )
        loaded = {name: _like(own, name, state.get(name)) for name, own in self.state.items()}
        if not loaded["scale"].gt(0).all():
            raise _damaged("scale", "is not positive")
        self.state, self._wants_probe = loaded, state.get("wants_probe") is True


def _like(own: Tensor, name: str, saved: object) -> Tensor:
    """A copy of `saved` on the device of `own`, if the two are alike and `saved` is finite."""
    if not isinstance(saved, Tensor):
        raise _damaged(name, "is missing")
    if (saved.dtype, saved.shape) != (own.dtype, own.shape):
        raise _damaged(name, f"is {saved.dtype} of shape {tuple(saved.shape)}")
    if not saved.isfinite().all():
        raise _damaged(name, "is not finite")
    return saved.to(own.device, copy=True)


def _damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"loss_scaling: the saved state is damaged, {name} {what}: resume from another checkpoint"
    )
