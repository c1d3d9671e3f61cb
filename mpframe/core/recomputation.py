"""Python code that runs in the backward pass gets the casts of its forward pass.

Activation checkpointing runs a forward pass again within the backward pass. By then the cast block
may have ended, and a GPU's backward pass runs in threads that have no block.
torch.utils.checkpoint restores the state of torch.autocast, but no lists and no pins. So the casts
are saved where PyTorch makes, in the forward pass, what waits for the backward pass:

    the frame of a checkpoint     keeps the function that is run again
    the node of a custom          has the function's `backward`: hand-written formulas, and
    autograd.Function             recomputation in reentrant checkpoints and reversible layers

Torch has no hooks for this. `_REPLACED` names the functions that are replaced, from the first block
that casts until the last precision with such a block is released or gone. The others in that list
run ops that no mode sees, and that torch would cast because a block turns torch.autocast on; the
last one is torch's average of a model, which must read the masters.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling
from torch.optim.swa_utils import AveragedModel

from mpframe.core.blocks import block, casts_here
from mpframe.core.cast import Casts
from mpframe.core.widening import update_from_masters

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
