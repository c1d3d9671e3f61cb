"""Opens Python functions of torch, so that the ops they call can be seen and cast one by one.

PyTorch shows an interceptor only the outermost call. `F.multi_head_attention_forward` is one name
to it, although a dozen ops run inside, some for half and some for fp32. Such a function starts by
asking `has_torch_function(...)` and hands itself over where the answer is yes. An opened copy has
the same code with that question answered "no": it runs its body, and the calls of the body are
intercepted in their turn.
"""

import sys
import types
from functools import cache
from typing import Any

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def open_function(function: Any) -> types.FunctionType | None:
    """A form of a Python function of torch whose inner calls are intercepted, if there is one.

    C functions and functions of users have none (None): they are run as they are.
    """
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, types.FunctionType) and inner.__module__ == "torch._tensor":
        return inner  # `1 / x`, `2 ** x`: a decorator asks, the body inside does not.
    if not isinstance(function, types.FunctionType) or not _asks(function):
        return None
    opened = types.FunctionType(
        function.__code__,
        _answered(function.__module__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _asks(function: types.FunctionType) -> bool:
    names = function.__code__.co_names
    if "super" in names:  # A method that ends in its own C form, by the same name: no ops inside.
        return False
    return any(name in names and name in function.__globals__ for name in _QUESTIONS)


@cache
def _answered(module: str) -> dict[str, Any]:
    """The globals of `module` with every question answered "no"."""
    return {**vars(sys.modules[module]), **dict.fromkeys(_QUESTIONS, _no)}


def _no(*_: Any) -> bool:
    return False
