"""One name for every spelling of an op.

PyTorch writes one computation in many ways: `a @ b` is `torch.matmul` and `torch.linalg.matmul`.
The cast is handed the function that was called; here it gets the name that the lists use. Ops of
other libraries, and torch's kernels called directly (`aten.mm`), keep the name of their library, as
in `torch.ops`: a list that names `mm` does not mean them.
"""

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

_ALIASES = {
    "arccos": "acos",
    "arcsin": "asin",
    "arctan2": "atan2",
    "concat": "cat",
    "concatenate": "cat",
    "det": "linalg_det",
    "divide": "div",
    "inverse": "linalg_inv",
    "linalg_cross": "cross",
    "linalg_matmul": "matmul",
    "logsigmoid": "log_sigmoid",
    "matrix_power": "linalg_matrix_power",
    "multiply": "mul",
    "orgqr": "linalg_householder_product",
    "row_stack": "vstack",
    "rsub": "sub",
    "slogdet": "linalg_slogdet",
    "sparse_mm": "_sparse_mm",
    "special_expit": "sigmoid",
    "subtract": "sub",
    "trapz": "trapezoid",
    "true_divide": "div",
}


@cache
def known_ops() -> frozenset[str]:
    """Every name, in any spelling, that an op list may hold.

    In-place forms (`exp_`) are not among them: they would write into a cast copy.
    """
    functions = (f for group in get_overridable_functions().values() for f in group)
    named = {getattr(function, "__name__", "") for function in functions}
    sparse = torch._C._sparse  # type: ignore[attr-defined]
    modules = (torch._C._VariableFunctions, torch._C._nn, sparse)
    builtin = {name for module in modules for name in dir(module)}
    names = named | builtin | _ALIASES.keys()
    return frozenset(name for name in names if name and name[:2] != "__" and name[-1] != "_")


def is_registered(name: str) -> bool:
    """True if `library.op` names an op that an imported library has registered with torch."""
    library, _, op = name.partition(".")
    return bool(op) and hasattr(getattr(torch.ops, library), op)


def ops_of(library: str) -> list[str]:
    """Every `library.op` that `library` has registered with torch."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return sorted({name.replace("::", ".") for name in names if name.startswith(f"{library}::")})


def canonical(name: str) -> str:
    """The one name of an op, for any of its aliases."""
    name = _ALIASES.get(name, name)
    plain = name.removeprefix("special_")
    return plain if plain in known_ops() else name


def op_name(function: Any) -> str:
    """The op that `function` runs; empty if it has no name."""
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return function._qualified_op_name.replace("::", ".")
    return canonical(getattr(function, "__name__", ""))
