"""Cast blocks: each thread has its own.

A block puts a `CastMode` on its thread's stack of function modes, which PyTorch keeps. So threads
share nothing that changes, and that stack says which casts are on. The innermost block decides,
also if it casts nothing. A block also sets the thread's torch.autocast, so that it answers as the
block casts.

A pin is a block around one module: hooks push it before the module's forward pass and pop it after.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from mpframe.core.cast import CastMode, Casts, Pins
from mpframe.core.errors import ConfigError
from mpframe.core.op_lists import PINS
from mpframe.core.policy import CASTABLE, Policy
from mpframe.core.tree import map_tensors


def pin_modules(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Hook every module that a pattern matches, or that is inside such a module."""
    handles = []
    for name, module in model.named_modules():
        pin = policy.pin_of(name)
        if pin is not None:
            enter, leave = _Enter(policy, name, pin[1]), _Leave(policy, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def check_patterns(model: nn.Module, policy: Policy) -> None:
    """Refuse a pattern that matches no module: it is most likely misspelt."""
    names = [name for name, _ in model.named_modules()]
    for pattern in policy.ops.modules:
        if not any(policy.matches(pattern, name) for name in names):
            known = ", ".join(names[1:9]) + (", ..." if len(names) > 9 else "")
            raise ConfigError(f"ops.modules[{pattern!r}] matches no module; the model has {known}")


# Classes and not functions within a function, so that a model with its hooks can be pickled.
@dataclass(frozen=True)
class _Enter:
    policy: Policy
    name: str
    pin: str

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        mode = present_mode(self.policy)
        if mode is None:
            return None
        mode.push_pin(self.name, self.pin)
        if self.pin not in PINS:
            return None
        inside = torch.float32 if self.pin == "fp32" else mode.half()
        return map_tensors(lambda tensor: cast_to(tensor, inside), (args, kwargs))


@dataclass(frozen=True)
class _Leave:
    policy: Policy
    name: str

    def __call__(self, _: nn.Module, args: Any, result: Any) -> Any:
        mode = present_mode(self.policy)
        popped = mode is not None and mode.pop_pin(self.name)
        if not popped or not self.policy.ops.empty:
            return None
        # Without lists no op casts its own inputs, and what follows expects half.
        return map_tensors(lambda tensor: cast_to(tensor, self.policy.half_dtype), result)


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`; unchanged if its format is never cast."""
    return tensor.to(dtype) if tensor.dtype in CASTABLE else tensor


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
