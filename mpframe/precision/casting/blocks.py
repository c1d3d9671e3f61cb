"""Cast blocks: each thread has its own.

A block puts a `CastMode` on its thread's stack of function modes, which PyTorch keeps. So threads
share nothing that changes, and that stack says which casts are on. The innermost block decides,
also if it casts nothing. A block also sets the thread's torch.autocast, so that it answers as the
block casts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from mpframe.precision.casting.cast import CastMode, Casts, Pins
from mpframe.precision.policy import Policy


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
