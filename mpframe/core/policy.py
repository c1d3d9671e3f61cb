"""The precision policy: a frozen value that decides; `cast.py` applies what it decides.

A policy knows the dtype mode, the half format, the op lists and how half is computed. It answers
with a `Compute` for an op, and with a pin for a module. It holds no tensor, so it can be printed,
compared and kept.

    mode    weights stored as               ops
    fp32    fp32                            nothing is cast
    amp     fp32                            cast at run time by the lists
    mixed   half if the op is in `allow`    cast at run time by the lists

blocks.py puts a pinned module, with everything inside it, in one format whatever the lists say.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from mpframe.core.errors import ConfigError, nearest
from mpframe.core.op_lists import PINS, OpLists
from mpframe.core.tree import HALVES

MODES = ("fp32", "mixed", "amp")
COMPUTES = ("auto", "native", "emulated")
NO_PRODUCTS = "none"  # In place of a recipe's name: products stay in half.
UNCAST = "autocast off"  # In place of a pin, in a region where the model turns torch.autocast off.
CASTABLE = frozenset({torch.float32, *HALVES.values()})  # No other format is ever cast.


class Compute(Enum):
    """The format an op computes in."""

    HALF = "half"
    FP32 = "fp32"
    WIDEST = "widest input"
    PYTORCH = "as PyTorch"


_COMPUTE_OF_LIST = {
    "allow": Compute.HALF,
    "deny": Compute.FP32,
    "infer": Compute.WIDEST,
    "none": Compute.PYTORCH,
}


@dataclass(frozen=True)
class Policy:
    """Which op runs, and which weight is stored, in which format.

    Args:
        mode: `fp32`, `mixed` or `amp`.
        half: `float16` or `bfloat16`, the 16-bit format of the run.
        ops: the op lists and module pins.
        compute: how half ops compute on a CPU: by `native` kernels, `emulated` (half inputs, fp32
            accumulation, one rounding), or `auto`: native if the CPU has the instructions. Also for
            products below 16 bits on any device: with `native` each needs an instruction, `auto` is
            native where a GPU has one.
        products: the name of the recipe that quantises the operands of matrix products and
            convolutions; `none`: they stay in half.
        recipes: a user's recipes, by name; those that are named and shipped are added to them. The
            policy reads the patterns in their `half`, and nothing else.

    Raises:
        ConfigError: a value is not one of those named here.
    """

    mode: str = "fp32"
    half: str = "float16"
    ops: OpLists = field(default_factory=OpLists.named)
    compute: str = "auto"
    products: str = "none"
    recipes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("dtype.mode", self.mode, MODES)
        _check_choice("dtype.half", self.half, HALVES)
        _check_choice("dtype.compute", self.compute, COMPUTES)
        object.__setattr__(self, "recipes", self._named_recipes())

    @property
    def casts(self) -> bool:
        """False if no op is ever cast, so that no interception is needed."""
        if self.mode == "fp32":
            return self.products != NO_PRODUCTS
        return not (self.ops.empty and not self.ops.modules)

    @property
    def stores_by_op(self) -> bool:
        """True if a weight's format depends on the ops that read it."""
        return self.mode == "mixed" and not self.ops.empty

    @property
    def half_dtype(self) -> torch.dtype:
        """The half format as a torch dtype."""
        return HALVES[self.half]

    def compute_of(self, op: str, pin: str | None = None) -> Compute:
        """The format `op` computes in, inside a module pinned to `pin` (None: not pinned)."""
        compute = _COMPUTE_OF_LIST[self.ops.list_of(op)]
        if pin == UNCAST and compute is not Compute.PYTORCH:
            return Compute.WIDEST
        if pin not in PINS or compute not in (Compute.HALF, Compute.FP32):
            return compute
        return Compute.FP32 if pin == "fp32" else Compute.HALF

    def recipe_of(self, pin: str | None = None) -> Any:
        """The recipe of the products in a module pinned to `pin`; None: they are not quantised."""
        return self.recipes.get(self.products if pin is None else pin)

    def recipe_name(self, pin: str | None = None) -> str | None:
        """The name of that recipe; None: there is none."""
        name = self.products if pin is None else pin
        return name if name in self.recipes else None

    def pin_of(self, module: str) -> tuple[str, str] | None:
        """The last pattern that matches a module's qualified name, and its pin; or None.

        The patterns of `ops.modules` come after those of the recipe.
        """
        recipe = self.recipe_of()
        in_half = dict.fromkeys(recipe.half, NO_PRODUCTS) if recipe else {}
        pins = [*in_half.items(), *self.ops.modules.items()]
        matching = [(pattern, pin) for pattern, pin in pins if self.matches(pattern, module)]
        return matching[-1] if matching else None

    def format_pin_of(self, module: str) -> tuple[str, str] | None:
        """As `pin_of`, but None for a pin to a recipe or to `none`."""
        pin = self.pin_of(module)
        return pin if pin is not None and pin[1] in PINS else None

    @staticmethod
    def matches(pattern: str, module: str) -> bool:
        """True if `pattern` names the module or one that contains it."""
        parts = module.split(".")
        owners = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return any(fnmatch.fnmatchcase(owner, pattern) for owner in owners)

    def emulates(self, device: torch.device) -> bool:
        """True if half ops on `device` compute in fp32 with one rounding of the result."""
        if device.type != "cpu" or self.compute == "native":
            return False
        return self.compute == "emulated" or not has_native_half(self.half)

    def _named_recipes(self) -> Mapping[str, Any]:
        names = {self.products, *self.ops.modules.values()} - {*PINS, NO_PRODUCTS}
        if not names and not self.recipes:
            return {}
        recipes: Mapping[str, Any] = lowbit().named_recipes(self)
        return recipes

    def __str__(self) -> str:
        half = [] if self.mode == "fp32" else [self.half]
        words = ", ".join([*half, *[self.products] * (self.products != NO_PRODUCTS)])
        return f"{self.mode}({words})" if words else self.mode


def lowbit() -> Any:
    """The products below 16 bits. Only this imports them, when a recipe is named."""
    return import_module("mpframe.lowbit.handler")


def has_native_half(half: str) -> bool:
    """True if this CPU has instructions that multiply `half` matrices."""
    if half == "float16":
        return False
    return bool(torch.cpu._is_avx512_bf16_supported())


def _check_choice(
    path: str, value: str, allowed: "tuple[str, ...] | dict[str, torch.dtype]"
) -> None:
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise ConfigError(
            f"{path}={value}: choose {', '.join(allowed)}" + (f"; {hint}" if hint else "")
        )
