"""Functions of torch that are unwrapped or replaced, and how torch is restored.

PyTorch shows a function mode only the outermost call: `F.multi_head_attention_forward` is one name,
although a dozen ops run inside. Such a function begins by asking `has_torch_function(...)`, and
passes itself to the mode if the answer is yes. `unwrap` makes a copy that always gets a no.

Python code in the backward pass gets the casts of its forward pass, which may have ended by then,
or run on another thread. So the casts are saved in the objects that PyTorch makes for the backward
pass: the frame of a checkpoint, and the node of a custom autograd.Function, in which reentrant
checkpoints and reversible layers recompute.

`_REPLACED` lists the functions that are replaced, from the first block that casts until the last
precision with such a block is gone. Some run ops that no mode sees, and that torch would cast
because a block turns torch.autocast on. AveragedModel is there to read masters, not half weights.
"""

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling
from torch.optim.swa_utils import AveragedModel

from mpframe.core.optim.widening import update_from_masters

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# They only check their arguments and call the op of their name: there is no other op inside.
_CALL_THEIR_OP = frozenset({"batch_norm", "embedding", "instance_norm", "max_pool2d_with_indices"})
# Unwrapped functions by key. Attributes and not a dict: a compiler reads a dict once, before the
# functions it meets later are unwrapped.
UNWRAPPED = SimpleNamespace()


@functools.cache
def unwrap(function: Any) -> str | None:
    """Unwrap a function of torch, if it needs that, and return its name in `UNWRAPPED`."""
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, FunctionType) and inner.__module__ == "torch._tensor":
        unwrapped = inner  # `1 / x`, `2 ** x`: a decorator asks, the body inside does not.
    elif isinstance(function, FunctionType) and _asks(function):
        unwrapped = _copy_with_answer(function)
    else:
        return None
    key = re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")
    setattr(UNWRAPPED, key, unwrapped)
    return key


def _asks(function: FunctionType) -> bool:
    names = function.__code__.co_names
    # A method that ends in `super` calls the C form of the same name: no ops inside.
    if function.__name__ in _CALL_THEIR_OP or "super" in names:
        return False
    return any(name in names and name in function.__globals__ for name in _QUESTIONS)


def _copy_with_answer(function: FunctionType) -> FunctionType:
    inside = function.__name__, function.__defaults__, function.__closure__
    unwrapped = FunctionType(function.__code__, _answer_no(function.__module__), *inside)
    unwrapped.__kwdefaults__ = function.__kwdefaults__
    return unwrapped


@functools.cache
def _answer_no(module: str) -> dict[str, Any]:
    """Return the globals of `module` with every question in `_QUESTIONS` answered "no"."""
    names = {**vars(sys.modules[module]), **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    del names["__name__"]  # By it torch.compile would find the real module.
    return names


MakeBlock = Callable[[], AbstractContextManager[None]]
# Compiled backward passes: their casts are in the graph, and a compiler's own code is never cast.
_COMPILED = "torch._functorch._aot_autograd"
_users: set[int] = set()
_originals: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()  # A garbage collection may release a user while another one is added.
_casts_here: Callable[[], MakeBlock]


def follow_backward_passes(user: object, casts_here: Callable[[], MakeBlock]) -> None:
    """Run backward passes under the casts of their blocks, until `stop_following(id(user))`.

    `casts_here()` returns a function that makes a block with this thread's present casts.
    """
    global _casts_here
    if is_compiling() or id(user) in _users:
        return
    weakref.finalize(user, stop_following, id(user)).atexit = False
    with _lock:
        _casts_here = casts_here
        for owner, name, run in () if _users else _REPLACED:
            _originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, _make_replacement(getattr(owner, name), run))
        _users.add(id(user))


def stop_following(user: int) -> None:
    """Forget the user with this id, and after the last one restore what was replaced in torch."""
    with _lock:
        _users.discard(user)
        while _originals and not _users:
            setattr(*_originals.pop())


def _make_replacement(function: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    return replacement


def _init_frame(init: Any, frame: Any, recompute: Any, *args: Any, **kwargs: Any) -> None:
    block_again = _casts_here()

    @functools.wraps(recompute)
    def recompute_in_block(*args: Any, **kwargs: Any) -> Any:
        with block_again():
            return recompute(*args, **kwargs)

    init(frame, recompute_in_block, *args, **kwargs)


def _init_node(init: Any, node: Any, *args: Any, **kwargs: Any) -> None:
    init(node, *args, **kwargs)
    if not node._forward_cls.__module__.startswith(_COMPILED):
        node._block_again = _casts_here()


def _run_node(apply: Any, node: Any, *gradients: Any) -> Any:
    with getattr(node, "_block_again", nullcontext)():
        return apply(node, *gradients)


def _run_without_autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    # A block turns autocast's cache off, which marks it even if a compiler hides its mode.
    with nullcontext() if torch.is_autocast_cache_enabled() else torch._C._DisableAutocast():
        return function(*args, **kwargs)


_REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.utils.checkpoint._CheckpointFrame, "__init__", _init_frame),
    (BackwardCFunction, "__init__", _init_node),
    (BackwardCFunction, "apply", _run_node),
    (torch.autograd, "_engine_run_backward", _run_without_autocast),
    (torch._C.ScriptMethod, "__call__", _run_without_autocast),
    (torch._C.ScriptFunction, "__call__", _run_without_autocast),
    (AveragedModel, "update_parameters", update_from_masters),
]
