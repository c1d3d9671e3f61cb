"""Loss scalers: what the step asks of one, and the two that never change their scale.

`LossScaler` is the protocol: it gives the scale, and learns from the largest gradient of each step.
`Scaler` is the base of the scalers that come with mpframe: a few named 0-d tensors on one device,
saved and loaded by name. `Static` keeps one scale for the whole run. `NoScaling` has the scale 1,
so the step takes one path whether the loss is scaled or not.

Scales are exact powers of two. `exp2` and `pow` are exact only within a bound that differs between
devices, and with a scale that is off by one bit every unscaling rounds. So `power_of_two` and
`exponent_of` write and read the bits. A refused argument is named as `loss_scaling.<argument>`.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.ranges import Range
from mpframe.core.tree import HALVES


class NoScaling:
    """Leaves the loss as it is. An overflow skips the step all the same."""

    kind = "none"

    def __init__(self) -> None:
        self._scale = torch.ones(())

    @property
    def scale(self) -> Tensor:
        """1, as 0-d float32."""
        return self._scale

    def update(self, amax: Tensor) -> None:
        """Do nothing."""

    def to(self, device: torch.device | str) -> Self:
        """Move the 1 to `device`, in place; returns self."""
        self._scale = self._scale.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take no state: that of a scaler means nothing here."""


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


Half = torch.dtype | str
"""A 16-bit format, or its name."""
_FP32_BIAS = 127
_FP32_MANTISSA_BITS = 23
COUNT_MAX = 2**31 - 1  # steps; far beyond any run, and safe in every integer format
FP32_MAX = torch.finfo(torch.float32).max
SCALES = Range(low=torch.finfo(torch.float32).tiny, high=FP32_MAX)
"""What a loss scale may be: a normal, finite float32. A subnormal one may be flushed to zero."""


def refused(
    argument: str, value: object, allowed: str, way_out: str = "leave it out for the default"
) -> ConfigError:
    """The error for a `value` that is not `allowed`."""
    return ConfigError(f"loss_scaling.{argument}={value}: must be {allowed}; {way_out}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number; a bool is none, `growth_interval: yes` is a slip."""
    return isinstance(value, Real) and not isinstance(value, bool)


def within(value: object, allowed: Range) -> TypeGuard[float]:
    """Whether `value` is a real number in a range."""
    return is_number(value) and allowed.holds(value if isinstance(value, int) else float(value))


def number(argument: str, value: object, allowed: Range) -> float:
    """`value` as a float, if it is a real number in the range."""
    if not within(value, allowed):
        raise refused(argument, value, f"a number {allowed}")
    return float(value)


def count(argument: str, value: object) -> int:
    """`value`, if it is a whole number from 1 to COUNT_MAX."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
        raise refused(argument, value, f"a whole number {Range(low=1, high=COUNT_MAX)}")
    return value


def half_format(value: object) -> torch.dtype:
    """The 16-bit format that `value` is or names, if a run can use it."""
    for name, half in HALVES.items():
        if value is half or value == name:
            return half
    raise refused("half", value, "float16 or bfloat16")


def whole_octaves(argument: str, scale: float) -> int:
    """e, if `scale` is 2^e."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise refused(argument, scale, "a power of two", f"use 2**{exponent - 1} or 2**{exponent}")
    return exponent - 1


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
        """Do nothing: the scale is fixed."""


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, for whole exponents from -126 to 127 in any dtype."""
    bits = (exponent.int() + _FP32_BIAS) << _FP32_MANTISSA_BITS
    return bits.view(torch.float32)


def exponent_of(power: Tensor) -> Tensor:
    """e of 2^e, as int32."""
    return torch.frexp(power).exponent - 1  # frexp gives a mantissa in [0.5, 1)


def largest_power_below(limit: float, amax: Tensor) -> Tensor:
    """The largest e with 2^e * amax <= limit, as int32; `amax` is finite and > 0."""
    room = torch.frexp(torch.as_tensor(limit, dtype=torch.float64, device=amax.device))
    used = torch.frexp(amax.double())  # float64 holds the subnormal float32 as normal numbers
    return room.exponent - used.exponent - (used.mantissa > room.mantissa).int()


def safe_scale(amax: float, half: torch.dtype, octaves: int = 1) -> float | None:
    """The largest power of two that leaves some octaves free above a gradient of this magnitude.

    Args:
        amax: the largest |unscaled gradient|.
        half: the format whose largest number limits the scaled gradient.
        octaves: how many are left free, >= 0.

    Returns:
        The scale; None if `amax` is 0, inf or nan, and so tells nothing.
    """
    if not 0.0 < amax < math.inf:
        return None
    limit = torch.finfo(half).max / 2.0**octaves
    return 2.0 ** int(largest_power_below(limit, torch.tensor(amax, dtype=torch.float64)))
