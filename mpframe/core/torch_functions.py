"""Cast blocks: each thread has its own.

A block puts a `CastMode` on its thread's stack of function modes, which PyTorch keeps. So threads
share nothing that changes, and that stack says which casts are on. The innermost block decides,
also if it casts nothing. A block also sets the thread's torch.autocast, so that it answers as the
block casts.

Unwraps Python functions of torch, so that the cast sees the ops they call one by one.

Python code that runs in the backward pass gets the casts of its forward pass.
"""

import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling
from torch.optim.swa_utils import AveragedModel
from torch.overrides import _get_current_function_mode_stack

from mpframe.core.cast import CastMode, Casts, Pins
from mpframe.core.policy import Policy
from mpframe.core.widening import update_from_masters


@contextmanager
def block(
    casts: Casts | None, pins: Pins | None = None, autocast: tuple[bool, torch.dtype] | None = None
) -> Iterator[None]:
    """Context manager in which ops are cast by `casts`; None: nothing is cast.

    Args:
        casts: of a precision.
        pins: of the modules that the block begins in, the innermost last. If None, a block inside
            a block of the same casts keeps its pins, and any other begins without.
        autocast: torch.autocast's answers at the beginning, enabled and dtype. If None, it is on.
    """
    outer = enabled_modes()
    state: AbstractContextManager[Any] = outer[-1].autocast(False) if outer else nullcontext()
    if casts is not None and casts.autocasts:
        enabled, dtype = autocast or (True, casts.policy.half_dtype)
        state = torch.autocast(casts.device_type, dtype, enabled, cache_enabled=False)
    with state:
        if pins is None and outer and casts is not None and outer[-1].casts is casts:
            yield
            return
        _set_enabled(outer, False)
        try:
            if casts is None:
                yield
            else:
                mode = casts.acquire()
                mode.push_pins(pins or ())
                try:
                    with mode:
                        yield
                finally:
                    casts.release(mode)
        finally:
            _set_enabled(outer, True)


def enabled_modes() -> list[CastMode]:
    """The mode that casts on this thread, in a list that is empty if none does."""
    active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in active if isinstance(mode, CastMode) and mode.enabled]


def casts_here() -> tuple[Casts | None, Pins, tuple[bool, torch.dtype] | None]:
    """Return the arguments of a `block` that restores this thread's present casts."""
    for mode in enabled_modes():
        state = torch.is_autocast_enabled(mode.casts.device_type), mode.half()
        return mode.casts, tuple(mode.pins), state
    return None, (), None


def present_mode(policy: Policy) -> CastMode | None:
    """The mode that casts on this thread, if it casts by `policy`."""
    return next((mode for mode in enabled_modes() if mode.policy == policy), None)


def _set_enabled(modes: list[CastMode], enabled: bool) -> None:
    for mode in modes:
        mode.enabled = enabled


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


# Compiled backward passes: their casts are in the graph, and a compiler's own code is never cast.
_COMPILED = "torch._functorch._aot_autograd"
_users: set[int] = set()
_originals: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()  # A garbage collection may release a user while another one is added.


def follow_backward_passes(casts: Casts) -> None:
    """Make backward passes run under the casts of their blocks, until `release`."""
    if is_compiling() or id(casts) in _users:
        return
    weakref.finalize(casts, release, id(casts)).atexit = False
    with _lock:
        for owner, name, run in () if _users else _REPLACED:
            _originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, _replacing(getattr(owner, name), run))
        _users.add(id(casts))


def release(user: int) -> None:
    """Forget the casts of this id; the last ones leave torch as it was."""
    with _lock:
        _users.discard(user)
        while _originals and not _users:
            setattr(*_originals.pop())


def _replacing(function: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    return replacement


def _make_frame(make: Any, frame: Any, recompute: Any, *args: Any, **kwargs: Any) -> None:
    saved = casts_here()

    @functools.wraps(recompute)
    def recompute_in_block(*args: Any, **kwargs: Any) -> Any:
        with block(*saved):
            return recompute(*args, **kwargs)

    make(frame, recompute_in_block, *args, **kwargs)


def _make_node(make: Any, node: Any, *args: Any, **kwargs: Any) -> None:
    make(node, *args, **kwargs)
    if not node._forward_cls.__module__.startswith(_COMPILED):
        node._casts = casts_here()


def _run_node(apply: Any, node: Any, *gradients: Any) -> Any:
    with block(*node._casts) if hasattr(node, "_casts") else nullcontext():
        return apply(node, *gradients)


def _run_without_autocast(function: Any, *args: Any, **kwargs: Any) -> Any:
    # A block keeps no cache in torch.autocast: so it is known where a compiler hides its mode.
    with nullcontext() if torch.is_autocast_cache_enabled() else torch._C._DisableAutocast():
        return function(*args, **kwargs)


_REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.utils.checkpoint._CheckpointFrame, "__init__", _make_frame),
    (BackwardCFunction, "__init__", _make_node),
    (BackwardCFunction, "apply", _run_node),
    (torch.autograd, "_engine_run_backward", _run_without_autocast),
    (torch._C.ScriptMethod, "__call__", _run_without_autocast),
    (torch._C.ScriptFunction, "__call__", _run_without_autocast),
    (AveragedModel, "update_parameters", update_from_masters),
]
