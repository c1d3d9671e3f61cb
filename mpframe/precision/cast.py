"""The cast: a function mode that runs each op of a block in the format that the policy decides.

PyTorch hands `CastMode` each call that a model makes, before autograd records it. So the casts are
part of the graph, and the backward pass runs in the formats of the forward pass.

A block puts a mode on its thread's stack. Threads share only the rules found so far, which are the
same whoever finds them. The innermost block decides, even if it casts nothing. Hooks pin a module:
its ops run in the pin's format.

A block also turns torch.autocast on, for models that ask about it, and the mode turns it off around
each op, so torch casts nothing itself. In a `torch.autocast` region of the model, half ops run in
the region's dtype. With `enabled=False` nothing is cast, except that mixed formats are widened.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, nn, set_autocast_enabled
from torch.amp import is_autocast_available
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from mpframe.core.casts import CastBlock, active_block, outside_casts
from mpframe.core.optim.masters import master_for
from mpframe.core.tree import HALF, HALVES, call_with, map_tensors
from mpframe.precision import handlers
from mpframe.precision.emulation import half_values, reuse_operand, round_to
from mpframe.precision.handlers import (
    HANDS_OFF,
    Args,
    Handler,
    Kwargs,
    OpHandler,
    Rule,
    dtypes_in,
)
from mpframe.precision.op_lists import PINS
from mpframe.precision.policy import CASTABLE, NO_PRODUCTS, UNCAST, Policy
from mpframe.precision.torch_functions import UNWRAPPED, MakeBlock

Pins = Sequence[tuple[str, str, bool]]  # (module, pin, whether torch.autocast was on there)


class Casts:
    """A policy, and the rules of its ops, which the blocks of one precision share.

    Attributes:
        saving: makes the context of each half op. If None, a block casts a weight only once.
        autocasts: whether torch.autocast is on in the blocks, for `device_type`.
        emulated: the half formats that are emulated, as an autocast region may choose either.
        found: for each pin, what `find_rule` returned for each function.
    """

    def __init__(self, policy: Policy, op_handlers: Sequence[OpHandler] = ()) -> None:
        self.policy, self.op_handlers = policy, tuple(op_handlers)
        self.saving: Callable[[], AbstractContextManager[Any]] | None = None
        self.autocasts = policy.mode != "fp32"
        self.compute_on(torch.device("cpu"))

    def compute_on(self, device: torch.device) -> None:
        """Prepare the blocks for tensors on `device`."""
        self.device_type = device.type if is_autocast_available(device.type) else "cpu"
        halves = HALVES.items() if self.autocasts else ()
        self.emulated = {h for n, h in halves if replace(self.policy, half=n).emulates(device)}
        pins = (None, *PINS, NO_PRODUCTS, UNCAST, *self.policy.recipes)
        self.found: dict[str | None, dict[Any, tuple[Rule, bool]]] = {pin: {} for pin in pins}

    def _choose(self, func: Any, pin: str | None) -> tuple[str, str, bool]:
        return handlers.choose(self.policy, func, pin)

    # For a compiler it is a constant. `torch.compiler.assume_constant_result` would import one.
    _choose._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def find_rule(self, func: Any, pin: str | None) -> tuple[Rule, bool]:
        """Return what runs `func` inside a module with this pin, and if torch.autocast stays on."""
        op, name, stays_on = self._choose(func, pin)
        run = _RULES.get(name) or partial(_run_unwrapped, name)
        if self.autocasts:
            run = handlers.adapt(run, op, name)
        for op_handler in self.op_handlers:
            custom = op_handler.handler_of(op, self.policy.recipe_name(pin))
            if custom is not None:
                return partial(_run_custom, custom, run), False
        return run, stays_on


class CastMode(CastBlock):
    """A function mode that casts the inputs of every op of one block, on one thread."""

    def __init__(self, casts: Casts, pins: Pins) -> None:
        super().__init__()
        self.casts, self.policy = casts, casts.policy
        self.pins = list(pins)  # of the modules that run, innermost last
        self._device_type, self._half = casts.device_type, torch.float64  # Set below.
        self._kept_weights: dict[tuple[int, bool], tuple[Tensor, int, Tensor, Tensor]] = {}
        self._set_half(self.policy.half_dtype)
        self._open_weights: dict[int, Tensor] = {}  # whose `.data` was taken
        self._steps = -1  # Not `_optimizer_steps`: a compiler would guard on it.
        self.follow_pins()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        on = is_autocast_enabled(self._device_type)
        pin = self._pin_when[1 if on else 0]  # A compiler of torch 2.11 takes no bool.
        if is_compiling():
            run, stays_on = self.casts.find_rule(func, pin)
            with nullcontext() if stays_on or not on else self.autocast(False):
                return run(self, func, args, kwargs)
        found = self.casts.found[pin].get(func)
        if found is None:
            found = self.casts.found[pin][func] = self.casts.find_rule(func, pin)
        run, stays_on = found
        if stays_on or not on:
            return run(self, func, args, kwargs)
        set_autocast_enabled(self._device_type, False)
        try:
            return run(self, func, args, kwargs)
        finally:
            set_autocast_enabled(self._device_type, True)

    def autocast(self, enabled: bool) -> torch.autocast:
        """Return a block in which torch.autocast is on or off, with its present dtype."""
        return torch.autocast(self._device_type, get_autocast_dtype(self._device_type), enabled)

    def half(self) -> torch.dtype:
        """Return the half format here: the run's, or the one of a torch.autocast region."""
        no_region = self._pin_when[0] == "half"  # torch.autocast is off: its dtype means nothing.
        return self.policy.half_dtype if no_region else get_autocast_dtype(self._device_type)

    def push_pin(self, module: str, pin: str) -> None:
        """Run ops as pinned, until `pop_pin`. Only a format pin overrides a region around it."""
        on = is_autocast_enabled(self._device_type) if pin in PINS else self.casts.autocasts
        self.pins.append((module, pin, on))
        self.follow_pins()

    def pop_pin(self, module: str) -> bool:
        """Undo `push_pin(module, ...)` and all inside it, and return whether there was one."""
        if all(name != module for name, *_ in self.pins):
            return False
        while self.pins.pop()[0] != module:
            pass
        self.follow_pins()
        return True

    def follow_pins(self) -> None:
        """Choose the pin to obey while torch.autocast is off, and while it is on.

        The innermost pin holds in the state it was set in. The other state is the model's own
        region inside the pinned module: turned off, nothing is cast, and turned on, no pin holds.
        """
        _, pin, on = self.pins[-1] if self.pins else ("", None, self.casts.autocasts)
        self._pin_when = (UNCAST, pin) if on else (pin, None)  # while off, while on

    def run_higher_order(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an op that calls functions among its arguments, whose ops are cast."""
        # A nested compile region may not close over the mode, so it becomes part of the graph
        # around it. A compiler must see the first change of its mode stack outside the op.
        with self:
            if func.__name__ == "invoke_subgraph" and not isinstance(args[0], GraphModule):
                return args[0](*args[1:], **kwargs)
        on = is_autocast_enabled(self._device_type)
        with self.autocast(False):  # Some ops trace their backward pass here.
            return func(*(self._wrap(value, on) for value in args), **kwargs)

    def _wrap(self, value: Any, on: bool) -> Any:
        if isinstance(value, (Tensor, type, GraphModule)) or not callable(value):
            return value  # A graph has its casts already.

        def run(*args: Any, **kwargs: Any) -> Any:
            with self, self.autocast(on):
                return value(*args, **kwargs)

        return run

    def _set_half(self, half: torch.dtype) -> None:
        """Cast to this half format from now on: an autocast region may choose the other one."""
        if half == self._half:
            return
        castable = CASTABLE if self.casts.autocasts else frozenset()  # In fp32 only OpHandlers act.
        self._half, self._emulates = half, half in self.casts.emulated
        self._to_half = castable if self._emulates else castable - {half}
        self._kept_weights.clear()

    def run_half(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        self._set_half(self.half())
        formats = dtypes_in(args, kwargs)
        if formats.isdisjoint(self._to_half) or not formats.isdisjoint(HANDS_OFF):
            return func(*args, **kwargs)
        if self.casts.saving is None:  # No context: this runs in every step.
            result = call_with(self._cast_to_half, func, args, kwargs)
        else:
            with self.casts.saving():
                result = call_with(self._cast_to_half, func, args, kwargs)
        return map_tensors(self._round, result) if self._emulates else result

    def run_data(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Read or set `.data`, and drop the weight's cast: writes through it leave no trace."""
        if not is_compiling() and _is_weight(args[0]):
            self._open_weights[id(args[0])] = args[0]
            if args[0].dtype == torch.float32 and args[1:] and args[1].dtype in HALF:
                master_for(args[0]).current(args[0])  # It turns half: keep its fp32 value.
            for enabled in (True, False):
                self._kept_weights.pop((id(args[0]), enabled), None)
        return func(*args, **kwargs)

    def _cast_to_half(self, tensor: Tensor) -> Any:
        """Cast `tensor` for a half op, a weight only once in a block."""
        if tensor.dtype not in self._to_half:
            return tensor
        if is_compiling():
            return self._make_operand(tensor.to(dtype=self._half))
        if self._steps != _optimizer_steps:
            self._steps = _optimizer_steps
            self._kept_weights.clear()
        # A cast made without a graph has no gradient, and one made with it has one for good.
        key = (id(tensor), torch.is_grad_enabled() and tensor.requires_grad)
        kept = self._kept_weights.get(key)
        if kept is not None and kept[1] == tensor._version:
            return reuse_operand(kept[2], kept[3])
        half = tensor.to(dtype=self._half)  # As a keyword it is parsed in half the time.
        operand: Any = self._make_operand(half)
        if self.casts.saving is not None:
            operand.cast_of = (tensor, self._half) if isinstance(tensor, nn.Parameter) else None
        elif _is_weight(tensor) and id(tensor) not in self._open_weights:
            # The weight is kept beside its cast: an id is only unique while its object lives.
            self._kept_weights[key] = (tensor, tensor._version, half, operand)
        return operand

    def _make_operand(self, half: Tensor) -> Tensor:
        """Return `half` for a half op, or its values in fp32 if the op is emulated."""
        emulated = self._emulates and half.device.type == "cpu"
        return half_values(half, self._half) if emulated else half

    def _round(self, tensor: Tensor) -> Tensor:
        return round_to(tensor, self._half) if tensor.device.type == "cpu" else tensor


_RULES = handlers.RULES | {"half": CastMode.run_half, "data": CastMode.run_data}
_RULES["higher order"] = CastMode.run_higher_order


def _run_unwrapped(name: str, mode: CastMode, _: Any, args: Args, kwargs: Kwargs) -> Any:
    with mode:
        return getattr(UNWRAPPED, name)(*args, **kwargs)


def _run_custom(custom: Handler, run: Rule, mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    result = custom(func, args, kwargs)
    return run(mode, func, args, kwargs) if result is NotImplemented else result


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad and not tensor.is_inference()


# Or buckets of one. They are counted because fused ones raise no version counters.
_optimizer_steps = 0


def _note_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_note_step)


@contextmanager
def cast_block(
    casts: Casts, pins: Pins | None = None, autocast: tuple[bool, torch.dtype] | None = None
) -> Iterator[None]:
    """Context manager in which ops are cast by `casts`.

    It begins with these `pins`, if None as a block of the same casts around it has them, and with
    `autocast`, torch's state of enabled and dtype, by default enabled.
    """
    outer = active_block()
    state: Any = nullcontext()
    if casts.autocasts:
        enabled, dtype = autocast or (True, casts.policy.half_dtype)
        state = torch.autocast(casts.device_type, dtype, enabled, cache_enabled=False)
    if pins is None and isinstance(outer, CastMode) and outer.casts is casts:
        with state if casts.autocasts else outer.autocast(False):
            yield
        return
    with outside_casts(), state, CastMode(casts, pins or ()):
        yield


def active_mode() -> CastMode | None:
    """Return the mode of the block that casts on this thread, if there is one."""
    block = active_block()
    return block if isinstance(block, CastMode) else None


def casts_here() -> MakeBlock:
    """Return a function that makes a block with this thread's present casts."""
    mode = active_mode()
    if mode is None:
        return outside_casts
    state = is_autocast_enabled(mode.casts.device_type), mode.half()
    return partial(cast_block, mode.casts, tuple(mode.pins), state)


def pin_modules(model: nn.Module, policy: Policy) -> list[RemovableHandle]:
    """Hook every module that a pattern matches, and every module inside it."""
    handles = []
    for name, module in model.named_modules():
        pin = policy.pin_of(name)
        if pin is not None:  # Partial and not local functions, so that a model can be pickled.
            enter, leave = partial(_enter, policy, name, pin[1]), partial(_leave, policy, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def _enter(policy: Policy, name: str, pin: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
    mode = _find_mode(policy)
    if mode is None:
        return None
    mode.push_pin(name, pin)
    if pin not in PINS or policy.mode == "fp32" or (policy.mode == "amp" and policy.ops.empty):
        return None  # No op expects another format.
    return handlers.cast_to((args, kwargs), torch.float32 if pin == "fp32" else mode.half())


def _leave(policy: Policy, name: str, _: nn.Module, args: Any, result: Any) -> Any:
    mode = _find_mode(policy)
    popped = mode is not None and mode.pop_pin(name)
    # Without lists no op casts its inputs, and the next module expects half.
    back = popped and policy.mode == "mixed" and policy.ops.empty
    return handlers.cast_to(result, policy.half_dtype) if back else None


def _find_mode(policy: Policy) -> CastMode | None:
    mode = active_mode()
    return mode if mode is not None and mode.policy == policy else None
