"""The precision policy: a frozen value that decides the format of each op and each weight.

    mode    weights stored as               ops
    fp32    fp32                            nothing is cast
    amp     fp32                            cast at run time by the lists
    mixed   half if its ops are half ops    cast at run time by the lists

A pin puts a module and everything inside it in one format, whatever the lists say. `cast.py`
applies the policy.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mpframe.core.errors import ConfigError, nearest
from mpframe.core.tree import HALVES
from mpframe.precision.op_lists import LISTS, PINS, OpLists

NO_PRODUCTS = "none"  # In place of a recipe: matrix products and convolutions stay in half.
UNCAST = "autocast off"  # In place of a pin, in a region where the model turns torch.autocast off.
CASTABLE = frozenset({torch.float32, *HALVES.values()})  # No other format is ever cast.


class Compute(Enum):
    """How an op of `allow`, of `deny`, of `infer` and of no list computes, in that order."""

    HALF = "half"
    FP32 = "fp32"
    WIDEST = "widest input"
    PYTORCH = "as PyTorch"


_COMPUTE_OF_LIST = dict(zip((*LISTS, "none"), Compute, strict=True))


@dataclass(frozen=True)
class Policy:
    """The format in which each op runs and each weight is stored.

    Args:
        mode, half, ops, compute: as for `Precision`.
        products: the name of a recipe, or `none`.
        recipes: by name. The policy reads only `half`, the patterns of modules that stay in half.

    Raises:
        ConfigError: a mode, half or compute that does not exist.
    """

    mode: str = "fp32"
    half: str = "float16"
    ops: OpLists = field(default_factory=OpLists.named)
    compute: str = "auto"
    products: str = "none"
    recipes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.ops, OpLists):
            raise ConfigError(f"ops={self.ops!r:.40}: must be OpLists(allow, deny, infer, modules)")
        modes, computes = ("fp32", "mixed", "amp"), ("auto", "native", "emulated")
        for name, allowed in {"mode": modes, "half": tuple(HALVES), "compute": computes}.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = nearest(str(value), allowed, before="; ")
                raise ConfigError(f"dtype.{name}={value}: choose {', '.join(allowed)}{hint}")

    @property
    def casts(self) -> bool:
        """Whether any op is cast, so that ops have to be intercepted."""
        if self.mode == "fp32":
            return self.products != NO_PRODUCTS
        return not (self.ops.empty and not self.ops.modules)

    @property
    def stores_by_op(self) -> bool:
        """Whether a weight's format depends on the ops that read it."""
        return self.mode == "mixed" and not self.ops.empty

    @property
    def half_dtype(self) -> torch.dtype:
        """The half format as a torch dtype."""
        return HALVES[self.half]

    def compute_of(self, op: str, pin: str | None = None) -> Compute:
        """Return the format `op` computes in, inside a module with this pin, if any."""
        compute = _COMPUTE_OF_LIST[self.ops.list_of(op)]
        if pin == UNCAST and compute is not Compute.PYTORCH:
            return Compute.WIDEST
        if pin not in PINS or compute not in (Compute.HALF, Compute.FP32):
            return compute
        return Compute.FP32 if pin == "fp32" else Compute.HALF

    def recipe_name(self, pin: str | None = None) -> str | None:
        """Return the name of the recipe for products in a module with this pin, if there is one."""
        name = self.products if pin is None else pin
        return name if name in self.recipes else None

    def pin_of(self, module: str) -> tuple[str, str] | None:
        """Return the last pattern that matches a module's qualified name, if any, and its pin."""
        recipe = self.recipes.get(self.products)
        half_pins = dict.fromkeys(recipe.half, NO_PRODUCTS) if recipe else {}
        pins = [*half_pins.items(), *self.ops.modules.items()]
        return next((pin for pin in reversed(pins) if self.matches(pin[0], module)), None)

    def format_pin_of(self, module: str) -> tuple[str, str] | None:
        """Do as `pin_of`, but return None for a pin to a recipe or to `none`."""
        pin = self.pin_of(module)
        return pin if pin is not None and pin[1] in PINS else None

    @staticmethod
    def matches(pattern: str, module: str) -> bool:
        """Return whether `pattern` names the module or one that contains it."""
        owners = accumulate(module.split("."), "{}.{}".format)
        return any(fnmatch.fnmatchcase(owner, pattern) for owner in owners)

    def check_patterns(self, model: nn.Module) -> None:
        """Raise for a pattern that matches no module: it is most likely misspelt."""
        names = [name for name, _ in model.named_modules()]
        for pattern in self.ops.modules:
            if not any(self.matches(pattern, name) for name in names):
                known = ", ".join(names[1:9]) + (", ..." if len(names) > 9 else "")
                raise ConfigError(
                    f"ops.modules[{pattern!r}] matches no module; the model has {known}"
                )

    def emulates(self, device: torch.device) -> bool:
        """Return whether half ops on `device` compute in fp32 with one rounding of the result."""
        if device.type != "cpu" or self.compute == "native":
            return False
        return self.compute == "emulated" or not has_native_half(self.half)

    def __str__(self) -> str:
        half = [] if self.mode == "fp32" else [self.half]
        words = ", ".join([*half, *[self.products] * (self.products != NO_PRODUCTS)])
        return f"{self.mode}({words})" if words else self.mode


def has_native_half(half: str) -> bool:
    """Return whether this CPU has instructions that multiply `half` matrices."""
    return half != "float16" and bool(torch.cpu._is_avx512_bf16_supported())
