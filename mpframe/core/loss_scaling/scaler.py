"""Loss scalers: their protocol, and the two that never change their scale.

`Scaler` is the base of the scalers that come with mpframe. `NoScaling` has the scale 1, so the step
takes one path whether the loss is scaled or not.

Scales are exact powers of two. `exp2` and `pow` may be off by one bit on some devices, and then
every unscaling rounds. So `power_of_two` and `exponent_of` write and read the bits.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from mpframe.core.errors import CheckpointError
from mpframe.core.ranges import Range, require
from mpframe.core.tree import widest

_FLOAT32 = torch.finfo(torch.float32)
_BIAS, _MANTISSA_BITS = 127, 23  # of float32
SCALES = Range(low=_FLOAT32.tiny, high=_FLOAT32.max)
"""The range of a loss scale: the normal float32. A subnormal one may be flushed to zero."""
DEFAULT = "leave it out for the default"


def number(argument: str, value: object, allowed: Range) -> float:
    """Return an argument of a scaler as a float, or raise ConfigError if it is out of range."""
    return float(require(f"loss_scaling.{argument}", value, allowed, DEFAULT))


class LossScaler(Protocol):
    """A state machine that chooses the loss scale and lives on the device.

    `update` is called once per step with the largest gradient of that step. It must not wait for
    the device (no `.item()`, no `bool(tensor)`).
    """

    @property
    def scale(self) -> Tensor:
        """The present scale: 0-d, float32, finite, > 0, on the scaler's device."""

    def update(self, amax: Tensor) -> None:
        """Learn the largest |unscaled gradient| of a step, of any of its micro-batches.

        `amax` is 0-d float32, >= 0; inf or nan if it overflowed, 0 if no sample counted.
        """

    def to(self, device: torch.device | str) -> Self:
        """Move the state to `device`, in place, and return self."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the scaler's future: plain tensors and numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` bit for bit. Raises CheckpointError for another kind of scaler."""


Scaling = LossScaler | Mapping[str, LossScaler] | None
"""One scaler, one for each of several losses by name, or none, which is `NoScaling`."""


def scale_of(scaler: LossScaler | None) -> Tensor | float:
    """Return the scale, or the number 1 if the loss is not scaled, so that no kernel runs."""
    return 1.0 if scaler is None or isinstance(scaler, NoScaling) else scaler.scale


def name_of(scaler: LossScaler) -> str:
    """Return `static`, `Backoff`, `LogMax`, `none`, or the class of a user's scaler."""
    return str(getattr(scaler, "kind", type(scaler).__name__))


class Scaler:
    """Keeps a scaler's state. `update` replaces `scale` and never writes into it.

    So a scale from an earlier step, in a log or in the graph of a loss, keeps its value.

    Args:
        state: the 0-d tensors that decide the scaler's future, among them `scale` (float32).
    """

    kind: ClassVar[str]
    """Its name in summaries and saved states: the class's name, unless the class sets another."""

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__dict__.get("kind", cls.__name__)

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.wants_probe = False  # whether `start_from(amax)` is to choose the first scale

    @property
    def scale(self) -> Tensor:
        return self.state["scale"]

    @property
    def floor(self) -> float:
        """The least scale it may take: here the present one."""
        return float(self.scale)

    def to(self, device: torch.device | str) -> Self:
        kind = {torch.float64: widest(torch.device(device))}
        self.state = {n: t.to(kind.get(t.dtype)).to(device) for n, t in self.state.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the kind of scaler, whether it waits for a probe, and a copy of every tensor."""
        tensors = {name: tensor.clone() for name, tensor in self.state.items()}
        return {"kind": self.kind, "wants_probe": self.wants_probe, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` bit for bit, on this scaler's device. Its other arguments stay.

        Raises:
            CheckpointError: `state` is damaged, or was made by another kind of scaler.
        """
        saved = state.get("kind", NoScaling.kind)
        if saved != self.kind:
            raise CheckpointError(
                f"loss_scaling={self.kind} cannot continue the saved state of {saved}: "
                f"use loss_scaling={saved}, or start a new run from the saved weights"
            )
        for name, present in self.state.items():
            damage = _damage(name, state.get(name), present)
            if damage:
                raise CheckpointError(
                    f"loss_scaling: the saved state is damaged, {name} {damage}: resume from "
                    "another checkpoint"
                )
        self.state = {n: state[n].to(old, copy=True) for n, old in self.state.items()}
        self.wants_probe = state.get("wants_probe") is True


def _damage(name: str, saved: object, present: Tensor) -> str:
    """Return what is wrong with a saved entry of the state, if anything is."""
    if not isinstance(saved, Tensor):
        return "is missing"
    if saved.shape != present.shape or not torch.can_cast(saved.dtype, present.dtype):
        return f"is {saved.dtype} of shape {tuple(saved.shape)}"
    if not saved.isfinite().all():
        return "is not finite"
    return "is not positive" if name == "scale" and not saved.gt(0).all() else ""


class Static(Scaler):
    """A constant loss scale.

    Args:
        scale: a positive, finite float32. A power of two makes scaling and unscaling exact.

    Raises:
        ConfigError: `scale` is out of its range.
    """

    kind = "static"

    def __init__(self, scale: float = 1.0) -> None:
        first = number("scale", scale, SCALES)
        super().__init__({"scale": torch.tensor(first, dtype=torch.float32)})

    def update(self, amax: Tensor) -> None:
        """Leave the scale as it is."""


class NoScaling(Static):
    """Leaves the loss as it is, and has no state. An overflow still skips the step."""

    kind = "none"

    def __init__(self) -> None:
        super().__init__(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state of another scaler."""


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32, for whole exponents from -126 to 127 in any dtype."""
    return ((exponent.int() + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def exponent_of(power: Tensor) -> Tensor:
    """Return e of 2^e, a normal float32, as int32."""
    return (power.view(torch.int32) >> _MANTISSA_BITS) - _BIAS
