"""Which op runs in which format: the lists as a value, read from `conf/ops/*.yaml`.

    allow   in half                         matrix products, convolutions, attention
    deny    in fp32                         losses, exponentials, softmax, norms, large reductions
    infer   in its widest input's format    element-wise ops, concatenation, pooling

An op is in at most one list. If it is in none, PyTorch's type promotion decides. Names are
PyTorch's, and one name covers every spelling: `matmul` is also `torch.matmul(a, b)` and `a @ b`. An
op of another library is written `library.op`: `torchvision.nms`. The lists hold on every device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

from mpframe.core.errors import ConfigError, nearest

# Aliases that torch lists as if they were different ops: alias=op.
_SPELLINGS = """
    arccos=acos arcsin=asin arctan2=atan2 concat=cat concatenate=cat det=linalg_det divide=div
    inverse=linalg_inv linalg_cross=cross linalg_matmul=matmul logsigmoid=log_sigmoid
    matrix_power=linalg_matrix_power multiply=mul orgqr=linalg_householder_product row_stack=vstack
    rsub=sub slogdet=linalg_slogdet sparse_mm=_sparse_mm special_expit=sigmoid subtract=sub
    trapz=trapezoid true_divide=div
"""
_ALIASES = dict(pair.split("=") for pair in _SPELLINGS.split())


@cache
def known_ops() -> frozenset[str]:
    """Return the names that a list may hold: no in-place forms, as they would write into a cast."""
    functions = (f for group in get_overridable_functions().values() for f in group)
    sparse = torch._C._sparse  # type: ignore[attr-defined]
    modules = (torch._C._VariableFunctions, torch._C._nn, sparse)
    names = {getattr(function, "__name__", "") for function in functions} | _ALIASES.keys()
    names.update(*map(dir, modules))
    return frozenset(name for name in names if name and name[:2] != "__" and name[-1] != "_")


def is_registered(name: str) -> bool:
    """Return whether `library.op` is an op that an imported library registered with torch."""
    library, _, op = name.partition(".")
    return bool(op) and hasattr(getattr(torch.ops, library), op)


def canonical(name: str) -> str:
    """Return the one name of an op, for any of its aliases."""
    name = _ALIASES.get(name, name)
    plain = name.removeprefix("special_")
    return plain if plain in known_ops() else name


def op_name(function: Any) -> str:
    """Return the name of the op that `function` runs, or an empty one."""
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return function._qualified_op_name.replace("::", ".")
    return canonical(getattr(function, "__name__", ""))


# mpframe/conf in the wheel, conf/ in a clone.
_PLACES = [parent / "conf" for parent in Path(__file__).resolve().parents[1:3]]
LISTS = ("allow", "deny", "infer")
PINS = ("fp32", "half")
# Ops that write running statistics into their arguments: only their first input is ever cast, and
# their weights stay in fp32, as the statistics do.
WITH_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})


@dataclass(frozen=True)
class OpLists:
    """Three disjoint sets of op names, and modules pinned by name pattern.

    Args:
        allow: ops that run in half.
        deny: ops that run in fp32.
        infer: ops that run in the widest format of their inputs.
        modules: glob pattern of module names -> `fp32`, `half`, `none` or a recipe's name. They
            are not checked here. The last match wins.

    Raises:
        ConfigError: an op is unknown or in two lists.
    """

    allow: frozenset[str] = field(default_factory=frozenset)
    deny: frozenset[str] = field(default_factory=frozenset)
    infer: frozenset[str] = field(default_factory=frozenset)
    modules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in LISTS:
            _check_known(f"ops.{name}", getattr(self, name))
            object.__setattr__(self, name, frozenset(map(canonical, getattr(self, name))))
        for first, second in combinations(LISTS, 2):
            for op in sorted(getattr(self, first) & getattr(self, second)):
                raise ConfigError(
                    f"ops.{first} and ops.{second} both hold {op!r}: an op runs in one format; "
                    f"to move it set ops.move.{op}={first} or {second}"
                )
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled.
        return type(self), (self.allow, self.deny, self.infer, dict(self.modules))

    @classmethod
    def named(cls, name: str = "default") -> Self:
        """Return the shipped lists `conf/ops/<name>.yaml`. ConfigError if there is no such file."""
        return cls.from_mapping(_read(name))

    @classmethod
    def from_mapping(cls, node: Mapping[str, Any]) -> Self:
        """Make lists from a mapping with any of `allow`, `deny`, `infer`, `move` and `modules`."""
        allow, deny, infer = (node.get(name) or frozenset() for name in LISTS)
        lists = cls(allow, deny, infer, node.get("modules") or {})
        return lists.moved(node.get("move") or {})

    def moved(self, move: Mapping[str, str]) -> Self:
        """Return a copy in which each op of `move` is in the list it names, or in no list (`none`).

        Raises:
            ConfigError: an op is unknown, or its destination is not a list.
        """
        for op, destination in move.items():
            _check_known(f"ops.move.{op}={destination}", [op])
            if destination not in (*LISTS, "none"):
                raise ConfigError(
                    f"ops.move.{op}={destination}: choose allow, deny, infer or none (= no list)"
                )
        lists = {op: name for name in LISTS for op in getattr(self, name)}
        lists |= {canonical(op): destination for op, destination in move.items()}
        allow, deny, infer = (frozenset(op for op in lists if lists[op] == n) for n in LISTS)
        return replace(self, allow=allow, deny=deny, infer=infer)

    def list_of(self, op: str) -> str:
        """Return which list holds `op`, in any spelling: `allow`, `deny`, `infer` or `none`."""
        op = canonical(op)
        return next((name for name in LISTS if op in getattr(self, name)), "none")

    @property
    def empty(self) -> bool:
        """Whether no op is listed at all, as in `ops=none`."""
        return not (self.allow or self.deny or self.infer)


def shipped(group: str) -> Path:
    """Return the folder of a group of the shipped configuration."""
    return next(place / group for place in _PLACES if (place / group).is_dir())


@cache
def _read(name: str) -> Mapping[str, Any]:
    folder = shipped("ops")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ConfigError(f"ops={name}: choose {', '.join(known)}")
    node = _parse(path.read_text())
    merged: dict[str, Any] = {}
    for base in node.pop("defaults", {"_self_": None}):  # Hydra's list of the files to merge.
        merged |= node if base == "_self_" else _read(base)
    return merged


def _parse(text: str) -> dict[str, dict[str, str]]:
    """Return a shipped file's sections of `- op` or `op: list`, without importing a YAML reader."""
    sections: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition("#")[0].strip(" -").partition(":")
        if key and line[0] != " ":
            items = sections[key] = {}
        elif key:
            items[key] = value.strip()
    return sections


def _check_known(path: str, ops: Iterable[str]) -> None:
    if isinstance(ops, str):
        raise ConfigError(f"{path}={ops}: give a list of ops: [{ops}]")
    for op in ops:
        if op not in known_ops() and canonical(op) not in _read_shipped() and not is_registered(op):
            raise ConfigError(f"{path}: {op!r} is {_explain_unknown(op)}")


def _explain_unknown(op: str) -> str:
    library = op.rpartition(".")[0]
    registered = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    theirs = sorted(n.replace("::", ".") for n in registered if n.startswith(f"{library}::"))
    if library and not theirs:
        return f"unknown: no library {library!r} that registers ops with PyTorch is imported"
    hint = nearest(op, theirs if library else known_ops(), before="; ")
    return f"not an op of {library or 'PyTorch'}{hint}"


@cache
def _read_shipped() -> frozenset[str]:
    """Return the ops in the shipped lists, which are allowed even if this torch lacks them."""
    return frozenset(canonical(op) for name in LISTS for op in _read("default")[name])
