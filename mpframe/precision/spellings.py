"""One name for every spelling of an op.

PyTorch writes one computation in many ways: `a @ b` is `torch.matmul`, `Tensor.matmul`,
`torch.linalg.matmul` and `torch.special.softmax` is `Tensor.softmax`. An interceptor is handed the
function that was called; here it gets the one name that the lists use.

`torch.ops.*` have no name here: they are kernels chosen by hand, or by a compiler that has already
cast their inputs, and run as they are called.
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
    "divide": "div",
    "linalg_cross": "cross",
    "linalg_matmul": "matmul",
    "logsigmoid": "log_sigmoid",
    "matrix_power": "linalg_matrix_power",
    "multiply": "mul",
    "row_stack": "vstack",
    "rsub": "sub",
    "special_expit": "sigmoid",
    "subtract": "sub",
    "trapz": "trapezoid",
    "true_divide": "div",
}


@cache
def known_ops() -> frozenset[str]:
    """Every name, in any spelling, that an op list may hold.

    Not `exp_` and its like, which write into their argument: a cast copy would be written instead.
    """
    functions = (f for group in get_overridable_functions().values() for f in group)
    named = {getattr(function, "__name__", "") for function in functions}
    builtin = {*dir(torch._C._VariableFunctions), *dir(torch._C._nn)}
    names = named | builtin | _ALIASES.keys()
    return frozenset(name for name in names if name and name[:2] != "__" and name[-1] != "_")


def canonical(name: str) -> str:
    """The one name of an op, for any of its aliases."""
    name = _ALIASES.get(name, name)
    plain = name.removeprefix("special_")
    return plain if plain in known_ops() else name


def op_name(function: Any) -> str:
    """The op that `function` runs; empty for kernels and for what has no name."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return ""
    return canonical(getattr(function, "__name__", ""))
