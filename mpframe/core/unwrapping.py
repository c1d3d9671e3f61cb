"""Unwraps Python functions of torch, so that the cast sees the ops they call one by one.

PyTorch shows a function mode only the outermost call: `F.multi_head_attention_forward` is one name,
although a dozen ops run inside. Such a function begins by asking `has_torch_function(...)`, and
hands itself over if the answer is yes. An unwrapped copy has the same code and always gets the
answer no.
"""

import re
import sys
import types
from functools import cache
from typing import Any

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


# They check their arguments and call an op of the same name, so nothing is gained by unwrapping
# them.
_CALL_THEIR_OP = frozenset({"batch_norm", "embedding", "instance_norm", "max_pool2d_with_indices"})


# Unwrapped functions by key. Attributes and not a dict: a compiler reads a dict once, before the
# functions it meets later are unwrapped.
UNWRAPPED = types.SimpleNamespace()


@cache
def unwrap(function: Any) -> str | None:
    """Unwrap a Python function of torch.

    Returns:
        The name of the unwrapped function in `UNWRAPPED`. None for C functions, users' functions,
        and those that only call the op of their name: they are run as they are.
    """
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, types.FunctionType) and inner.__module__ == "torch._tensor":
        unwrapped = inner  # `1 / x`, `2 ** x`: a decorator asks, the body inside does not.
    elif isinstance(function, types.FunctionType) and _asks(function):
        unwrapped = _copy_with_answer(function)
    else:
        return None
    key = re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
    setattr(UNWRAPPED, key, unwrapped)
    return key


def _copy_with_answer(function: types.FunctionType) -> types.FunctionType:
    names = _answered(function.__module__)
    unwrapped = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    unwrapped.__kwdefaults__ = function.__kwdefaults__
    return unwrapped


def _asks(function: types.FunctionType) -> bool:
    names = function.__code__.co_names
    if function.__name__ in _CALL_THEIR_OP:
        return False
    if "super" in names:  # A method that ends in the C form of the same name: no ops inside.
        return False
    return any(name in names and name in function.__globals__ for name in _QUESTIONS)


@cache
def _answered(module: str) -> dict[str, Any]:
    """The globals of `module` with every such question answered "no"."""
    names = {**vars(sys.modules[module]), **dict.fromkeys(_QUESTIONS, _no)}
    del names["__name__"]  # By it torch.compile would find the module, with the questions.
    return names


def _no(*_: Any) -> bool:
    return False
