"""What GPUs would make of a recipe for products below 16 bits: a calculation, no measurement.

It takes the dense peak rates that NVIDIA publishes, in PFLOP/s:

    H100 SXM   bf16 0.99, fp8 1.98                  (H100 datasheet)
    B200       bf16 2.25, fp8 and fp6 4.5, fp4 9    (Blackwell architecture brief, HGX B200)
    GB300      bf16 2.5, fp8 and fp6 5, fp4 15      (GB300 NVL72, as others report its datasheet)

A layer has three products of one size; each takes the time of its wider operand.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpframe.errors import MpframeError
from mpframe.report.groups import NO_RECIPE, RunGroup, Span
from mpframe.report.records import Record

if TYPE_CHECKING:  # They import torch, which a report without recipes does not need.
    from mpframe.precision.products.recipe import Recipe
    from mpframe.precision.products.scaling import Quantization

RATES: Mapping[str, Mapping[str, float]] = {
    "H100": {"fp8": 2},
    "B200": {"fp8": 2, "mx": 2, "fp4": 4},
    "GB300": {"fp8": 2, "mx": 2, "fp4": 6},
}
"""How many times as fast as bf16 each GPU multiplies: fp8 with scales of tensors, rows or blocks of
128; mx, in finer blocks or 6 bits; fp4."""
_KINDS = ("fp4", "mx", "fp8")  # the narrowest first
_WIDEST, _FP4 = 8, 4  # bits of what GPUs have instructions for
_PRODUCTS, _HALF_BITS = 3, 16
_SCALE_BITS = {"fp32": 32, "e8m0": 8, "e4m3": 8, "none": 0}
_LARGE_BLOCK = 128
_SATURATED = "numerics/products/saturated/"


def recipe_of(group: RunGroup) -> "Recipe | None":
    """The recipe of a group's options; None without one, or if they make none."""
    from mpframe.precision.products.recipe import Recipe

    name = group.products
    if name == NO_RECIPE:
        return None
    own = _nested(group.runs[0].options, f"dtype.recipes.{name}.")
    try:
        return Recipe.from_mapping(name, own) if own else Recipe.named(name)
    except (MpframeError, TypeError, ValueError, AttributeError):
        return None  # A run's folder may come from anybody.


def _nested(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The options below `prefix`, as the tree they were."""
    tree: dict[str, Any] = {}
    for path, value in options.items():
        if path.startswith(prefix):
            *names, last = path.removeprefix(prefix).split(".")
            node = tree
            for name in names:
                node = node.setdefault(name, {})
            node[last] = value
    return tree


def is_narrow(recipe: "Recipe") -> bool:
    """Whether all its formats have at most 8 bits, as those of GPUs."""
    pairs = recipe.products.values()
    return all(_element_bits(how) <= _WIDEST for pair in pairs for how in pair.values())


def time_on(gpu: str, recipe: "Recipe") -> float:
    """The time of a layer's products relative to bf16, of which the GPU makes what it cannot."""
    kinds = [max(map(_kind, pair.values()), key=_KINDS.index) for pair in recipe.products.values()]
    times = [1 / RATES[gpu].get(kind, 1.0) for kind in kinds]
    return (sum(times) + _PRODUCTS - len(times)) / _PRODUCTS


def bits_of(recipe: "Recipe") -> float:
    """The bits of a value with its share of the scale: the mean over the operands."""
    bits = [_bits(how) for pair in recipe.products.values() for how in pair.values()]
    return (sum(bits) + _HALF_BITS * (2 * _PRODUCTS - len(bits))) / (2 * _PRODUCTS)


def _kind(how: "Quantization") -> str:
    """The instructions that multiply such an operand."""
    bits = _element_bits(how)
    if bits <= _FP4:
        return "fp4"
    fine = how.per == "block" and how.block < _LARGE_BLOCK
    return "mx" if fine or bits < _WIDEST else "fp8"


def _bits(how: "Quantization") -> float:
    share = _SCALE_BITS[how.scale] / (how.block * how.across) if how.per == "block" else 0
    return _element_bits(how) + share


def _element_bits(how: "Quantization") -> int:
    return 1 + how.format.exponent_bits + how.format.mantissa_bits


def saturated(runs: Sequence[Record]) -> Span | None:
    """Over the runs, the largest share of saturated values of an operand in the last report."""
    return Span.of(_worst(run) for run in runs if run.finished)


def _worst(run: Record) -> float | None:
    curves = [curve for tag, curve in run.curves.items() if tag.startswith(_SATURATED)]
    last = [curve[-1] for curve in curves if curve]
    step = max((step for step, _ in last), default=None)
    return max((value for at, value in last if at == step), default=None)
