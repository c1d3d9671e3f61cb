"""Casts, as the step sees them: a block around each forward pass, which a loss may leave.

The step only asks for a block. `mpframe.precision` makes the ones that cast; without it ops run in
the formats of their inputs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class ForwardCasts(Protocol):
    """Decides in which formats a forward pass runs, as `mpframe.Precision` does."""

    def cast(self) -> AbstractContextManager[None]:
        """Return a block around one forward pass."""


class CastBlock(TorchFunctionMode):
    """A function mode that casts the inputs of ops, on one thread, while it is `enabled`."""

    enabled = True

    def autocast(self, enabled: bool) -> torch.autocast:
        """Return a block in which torch.autocast is on or off, with its present dtype."""
        raise NotImplementedError


def active_block() -> CastBlock | None:
    """Return the block that casts on this thread: all but the innermost one are disabled."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode for mode in stack if isinstance(mode, CastBlock) and mode.enabled), None)


@contextmanager
def outside_casts() -> Iterator[None]:
    """Context manager in which no op is cast, for a loss whose inputs are in fp32 already."""
    block = active_block()
    if block is None:
        yield
        return
    block.enabled = False
    try:
        with block.autocast(False):
            yield
    finally:
        block.enabled = True


class NoCasts:
    """Casts nothing: the `fp32` mode."""

    def cast(self) -> AbstractContextManager[None]:
        return outside_casts()
