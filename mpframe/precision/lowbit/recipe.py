"""A recipe: how each operand of each of the three products of a layer is quantised.

A layer y = x w has three products, and each sums over another axis:

    forward   y = x w        over the inputs of the layer
    dx        dx = dy w'     over its outputs
    dw        dw = x' dy     over the samples

So x, w and dy are quantised twice, each time along the axis that is summed over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from omegaconf import OmegaConf

from mpframe.core.errors import ConfigError, nearest
from mpframe.core.ranges import require_whole
from mpframe.precision.lowbit.formats import FORMATS, ElementFormat
from mpframe.precision.lowbit.scaling import RULES, Quantization
from mpframe.precision.op_lists import shipped

OPERANDS = {"forward": ("x", "w"), "dx": ("dy", "w"), "dw": ("x", "dy")}
_FOLDER = shipped("dtype/products")
_CHOICES = {
    "per": ("tensor", "row", "block"),
    "scale": ("fp32", "e8m0", "e4m3", "none"),
    "rule": RULES,
    "rounding": ("nearest", "stochastic"),
}


@dataclass(frozen=True)
class Recipe:
    """The quantizations of the products of a model.

    `products` has the operands of `forward`, `dx` and `dw` by name (`x`, `w`, `dy`). A product that
    is left out is computed in half.
    """

    name: str
    products: Mapping[str, Mapping[str, Quantization]]
    half: tuple[str, ...] = ()  # name patterns of modules whose products stay in half
    attention: bool = False  # quantise the two products in `scaled_dot_product_attention`

    @classmethod
    def named(cls, name: str, option: str = "dtype.products") -> Self:
        """Return the shipped recipe `conf/dtype/products/<name>.yaml`, which `option` asks for."""
        known = list_recipes()
        if name not in known:
            raise ConfigError(
                f"{option}={name}: choose none, {', '.join(known)}, or a recipe of dtype.recipes, "
                f"for a pin also fp32 or half{nearest(name, known, before='; ')}"
            )
        file: Any = OmegaConf.to_container(OmegaConf.load(_FOLDER / f"{name}.yaml"))
        return cls.from_mapping(name, file["recipes"][name])

    @classmethod
    def from_mapping(cls, name: str, node: Mapping[str, Any]) -> Self:
        """Return a recipe from an entry of `dtype.recipes`."""
        path = f"dtype.recipes.{name}"
        _require_known(path, node, ("every", *OPERANDS, "half", "attention"))
        every = node.get("every") or {}
        products = {
            product: _read_operands(f"{path}.{product}", every, node.get(product) or {}, operands)
            for product, operands in OPERANDS.items()
            if node.get(product, {}) is not None
        }
        half, attention = tuple(node.get("half") or ()), bool(node.get("attention", False))
        return cls(name, products, half, attention)

    def __str__(self) -> str:
        lines = [
            f"{product}: " + ", ".join(f"{name} {how}" for name, how in pair.items())
            for product, pair in self.products.items()
        ]
        lines += [f"{product}: in half" for product in OPERANDS if product not in self.products]
        return "\n".join(f"{self.name} {line}" for line in lines)


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml") if file.stem != "none")


def _read_operands(
    path: str, every: Mapping[str, Any], node: Mapping[str, Any], names: tuple[str, ...]
) -> dict[str, Quantization]:
    _require_known(path, node, names)
    nodes = {name: {**every, **(node.get(name) or {})} for name in names}
    pair = {name: _read_quantization(f"{path}.{name}", entry) for name, entry in nodes.items()}
    sizes = {how.hadamard for how in pair.values()}
    if len(sizes) > 1:
        raise ConfigError(
            f"{path}: hadamard={min(sizes)} and {max(sizes)}: give both operands the same size, so "
            "that the transforms cancel"
        )
    return pair


def _read_quantization(path: str, node: Mapping[str, Any]) -> Quantization:
    _require_known(path, node, [field.name for field in fields(Quantization)])
    for key, allowed in _CHOICES.items():
        if key in node and node[key] not in allowed:
            raise ConfigError(f"{path}.{key}={node[key]}: choose {', '.join(allowed)}")
    for key, least in {"block": 1, "across": 1, "hadamard": 0}.items():
        require_whole(f"{path}.{key}", node.get(key, least), least)
    how = Quantization(**{**node, "format": _read_format(path, node.get("format"))})
    size = how.hadamard
    if size & (size - 1) or size == 1:
        raise ConfigError(f"{path}.hadamard={size}: must be 0 or a power of two, at least 2")
    if how.per == "block" and size and max(size, how.block) % min(size, how.block):
        raise ConfigError(
            f"{path}.hadamard={size}: block={how.block} must be a multiple of it, or divide it"
        )
    if how.across > 1 and how.per != "block":
        raise ConfigError(f"{path}.across={how.across}: does nothing with per={how.per}")
    return how


def _read_format(path: str, node: Any) -> ElementFormat:
    if isinstance(node, Mapping):
        _require_known(f"{path}.format", node, [field.name for field in fields(ElementFormat)])
        bits = f"e{node.get('exponent_bits', 0)}m{node.get('mantissa_bits', 0)}"
        return ElementFormat(**{"name": bits, "exponent_bits": 0, "mantissa_bits": 0, **node})
    if str(node) not in FORMATS:
        raise ConfigError(
            f"{path}.format={node}: choose {', '.join(FORMATS)}, or give exponent_bits and "
            f"mantissa_bits{nearest(str(node), FORMATS, before='; ')}"
        )
    return FORMATS[node]


def _require_known(path: str, node: Any, known: Iterable[str]) -> None:
    choices = ", ".join(known)
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path}={node}: must be a mapping with {choices}")
    for key in node:
        if key not in known:
            hint = nearest(str(key), known, before="; ")
            raise ConfigError(f"{path}.{key}: no such option; choose {choices}{hint}")
