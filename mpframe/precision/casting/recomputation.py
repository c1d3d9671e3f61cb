"""Python code that runs in the backward pass gets the casts of its forward pass.

Activation checkpointing runs a forward pass again within the backward pass. By then the cast block
may have ended, and a GPU's backward pass runs in threads of its own, which have no block.
torch.utils.checkpoint saves and restores the state of torch.autocast, but not a function mode. So
the casts are saved here, where PyTorch makes in the forward pass what waits for the backward pass:

    the frame of a checkpoint     keeps the function that is run again
    the node of a custom          has the function's `backward`: hand-written formulas, and what
    autograd.Function             recomputes, as reentrant checkpoints and reversible layers do

So a `backward` that meets half and fp32 is cast as its `forward` was. torch.autocast does that only
for functions marked with `torch.amp.custom_bwd`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

from mpframe.precision.casting.blocks import block, casts_here

# Compiled backward passes: their casts are in the graph, and a compiler's own code is never cast.
_COMPILED = "torch._functorch._aot_autograd"


@functools.cache
def follow_backward_passes() -> None:
    """Let every checkpoint and custom function keep the casts that are on when it is made."""
    _follow_checkpoints(torch.utils.checkpoint._CheckpointFrame)
    _follow_functions(BackwardCFunction)


def with_casts_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the casts that are on now on this thread, whenever and wherever it runs."""
    noted = casts_here()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with block(*noted):
            return function(*args, **kwargs)

    return run


def _follow_checkpoints(frame: Any) -> None:
    """Let frames keep their function with the casts that are on when the frame is made."""
    make = frame.__init__

    @functools.wraps(make)
    def make_with_casts(self: Any, recompute: Callable[..., Any], *args: Any, **kw: Any) -> None:
        make(self, with_casts_of_now(recompute), *args, **kw)

    frame.__init__ = make_with_casts


def _follow_functions(node: Any) -> None:
    """Let the nodes of custom functions run `backward` under the casts of the forward pass."""
    make, apply = node.__init__, node.apply

    @functools.wraps(make)
    def make_with_casts(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._casts = casts_here()

    @functools.wraps(apply)
    def apply_with_casts(self: Any, *gradients: Any) -> Any:
        if self._forward_cls.__module__.startswith(_COMPILED):
            return apply(self, *gradients)
        with block(*self._casts):
            return apply(self, *gradients)

    node.__init__, node.apply = make_with_casts, apply_with_casts
