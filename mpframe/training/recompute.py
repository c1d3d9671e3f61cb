"""Activation checkpointing (Chen et al. 2016): less memory, for a second forward pass.

A module that is recomputed keeps its inputs for the backward pass and none of the activations
within it. When the backward pass comes to it, it runs again, as it ran the first time: under the
same casts, with the same random numbers, and from the buffers and plain attributes as they were
then. So the gradients are the same bit for bit, and a BatchNorm moves its running statistics once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpframe.errors import ConfigError
from mpframe.optim.selection import hint
from mpframe.precision.casting.blocks import block, casts_here
from mpframe.precision.module_state import State


def recompute(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let modules of `model` run again in the backward pass, while they are trained.

    The names of modules and weights stay as they are.

    Args:
        model: changed in place.
        patterns: of module names, as in `ops.modules`; a module within one that matches runs again
            with it.

    Raises:
        ConfigError: a pattern matches no module.
    """
    _refuse_idle(model, patterns)
    chosen = [n for n, _ in model.named_modules() if any(fnmatchcase(n, p) for p in patterns)]
    for name in chosen:
        if not any(_is_within(name, other) for other in chosen):
            module = model.get_submodule(name)
            module.forward = _Recomputed(module)


# A class and not a function within a function, so that a model can be copied and pickled.
class _Recomputed:
    """The forward pass of a module, with a checkpoint around it where a backward pass follows."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first forward pass, and of the second."""
        return nullcontext(), _AsFirst(self._module)


class _AsFirst(ExitStack):
    """The casts and the state of now, for each forward pass that runs again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._casts, self._state = casts_here(), State.of(module).with_copies()

    def __enter__(self) -> Self:
        self.enter_context(block(*self._casts))
        self.enter_context(self._state)
        return self


def _is_within(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def _refuse_idle(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"trainer.recompute=[{pattern}]: matches no module; {hint(pattern, names[1:])}"
            )
