"""How one call is run: a handler for each rule of the lists.

    half            inputs rounded to half, by the cast mode, which keeps the casts of weights
    fp32            half inputs widened
    widest input    half inputs widened if another input is fp32; with `rounded`, an op that has no
                    half kernel on a CPU runs in fp32 there and its result is rounded once
    as PyTorch      nothing is cast
    into, item      a write in place, `x[key] = value`: sources take the format of what is written
    ... data        only for the first input, as the op writes its statistics into the others
    ... held        a number that is written, beyond the end of a half format, is held at that end

Never cast: integers, booleans, complex, float64 and float8 tensors, and the floating tensors beside
a float64 or complex one; ops given an explicit `dtype=` or `out=`; running statistics.

`OpHandler` is the door for ops that run in another way, such as products below 16 bits.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from mpframe.core.comm import Comm
from mpframe.core.emulation import FAULTY, WITHOUT_HALF_KERNEL, is_faulty, rounded
from mpframe.core.op_lists import WITH_STATISTICS, op_name
from mpframe.core.policy import CASTABLE, Compute, Policy
from mpframe.core.torch_functions import unwrap
from mpframe.core.tree import HALF, call_with, is_simple, map_tensors, tensors_in, widened

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]
"""Takes the function that was called, and its arguments before any cast; returns the result."""
Readers = Iterable[tuple[str, str | None]]
"""The ops that read a layer's weights, each with the pin of the module that it runs in."""


class OpHandler:
    """The base class for `Precision(..., op_handlers=[...])`; no method has to be overridden."""

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        """Return what runs an op, or None to leave it to the lists.

        The answer is kept, so it must be the same each time. While a handler runs, nothing is cast.
        It may return NotImplemented: then the lists decide about that call.

        Args:
            op: its name, as the lists write it.
            recipe: the name in `dtype.products`, or in a pin of the module that runs, if any.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Look at a model before it runs, and refuse what cannot be done on its device."""

    def describe(self, name: str, module: nn.Module, op: str | None, readers: Readers) -> str:
        """Return in words how a layer runs, for the dtype map; empty: as the map says anyway."""
        return ""

    def sync(self, comm: Comm) -> None:
        """Bring what a step measured in line with the other ranks; called after each step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts from step to step, under names that no other handler uses."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the names may be missing."""


# In-place forms that torch refuses if a source has another format than the tensor it goes into.
_WRITES_ONE_FORMAT = """
    addbmm_ addmm_ addmv_ baddbmm_ heaviside_ index_add_ index_copy_ index_put_ index_reduce_ lerp_
    masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_
"""
# Ops that write a number into a tensor, or bound one by it, and refuse a number it cannot hold.
_WRITES_A_NUMBER = """
    clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ constant_pad_nd fill fill_
    fill_diagonal_ full full_like hardtanh hardtanh_ index_fill index_fill_ masked_fill masked_fill_
    new_full pad pad_sequence scatter scatter_ threshold threshold_
"""
# What models call most often that torch.autocast never casts, nor any op inside: it may stay on.
_NOT_AUTOCAST = """
    __add__ __get__ __getitem__ __mul__ __radd__ __rmul__ __set__ __sub__ __truediv__ add contiguous
    _enter_autocast _exit_autocast div expand flatten float gelu mul permute relu reshape silu size
    sub to transpose unsqueeze view
"""
NOT_AUTOCAST = frozenset(_NOT_AUTOCAST.split())
WRITES_ONE_FORMAT = frozenset(_WRITES_ONE_FORMAT.split())
WRITES_A_NUMBER = frozenset(_WRITES_A_NUMBER.split())
# None stands for a format that the caller asks for, with `dtype=` or `out=`.
HANDS_OFF = frozenset({None, torch.float64, torch.complex32, torch.complex64, torch.complex128})

_data: Any = torch._C.TensorBase.data
_DATA = (_data.__get__, _data.__set__)  # reads of `.data`, and `.data = ...`
AS_IS = Compute.PYTORCH.value


def handler_name(op: str, compute: Compute) -> str:
    """Return the name of the handler of `op`, which computes in `compute`."""
    if op == "__setitem__":
        return "item"
    rule = "into" if op in WRITES_ONE_FORMAT else compute.value
    if rule == "widest input" and op in WITHOUT_HALF_KERNEL:
        return f"{rule} rounded"
    if rule == "half" and op in FAULTY:
        return f"{rule} {op}"
    if rule in ("half", "fp32") and op in WITH_STATISTICS:
        return f"{rule} data"
    return f"{rule} held" if op in WRITES_A_NUMBER else rule


def choose(policy: Policy, func: Any, pin: str | None) -> tuple[str, bool, str, str | None]:
    """Return a handler's name, whether torch.autocast may stay on, the op and the recipe."""
    op, fp32 = op_name(func), policy.mode == "fp32"
    name = AS_IS if fp32 else handler_name(op, policy.compute_of(op, pin))
    unlisted = _choose_unlisted(func) if name == AS_IS else None
    stays_on = fp32 or unlisted is not None or op in NOT_AUTOCAST
    return unlisted or name, stays_on, op, policy.recipe_name(pin)


def _choose_unlisted(func: Any) -> str | None:
    if isinstance(func, HigherOrderOperator):
        return "higher order"
    return "data" if func in _DATA else unwrap(func)


# A compiler takes the choice as given and traces the handler. The mark is all that
# `torch.compiler.assume_constant_result` sets; calling that imports the compiler, for seconds.
choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def handlers(run_half: Handler) -> dict[str, Handler]:
    """Return every handler by its name; `run_half` runs half ops."""
    rules: dict[str, Handler] = {
        "half": run_half,
        "fp32": _run_fp32,
        "widest input": _run_widest,
        AS_IS: _run_as_is,
        "into": _run_into,
    }
    return {
        **rules,
        **{f"half {op}": _without_fault(op, run_half) for op in FAULTY},
        **{f"{rule} data": _on_data_only(rules[rule]) for rule in ("half", "fp32")},
        **{f"{rule} held": _holding_numbers(run) for rule, run in rules.items()},
        "widest input rounded": _run_widest_rounded,
        "item": _run_item,
    }


def cast_to(node: Any, dtype: torch.dtype) -> Any:
    """Cast each tensor in `node` to `dtype`, except formats that are never cast."""
    return map_tensors(lambda t: t.to(dtype) if t.dtype in CASTABLE else t, node)


def formats_of(args: Iterable[Any], kwargs: Kwargs) -> set[torch.dtype | None]:
    """Return the formats of the tensors of a call, and None if the caller fixes the result's."""
    found: set[torch.dtype | None] = set()
    for value in args:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif is_simple(value):
            continue
        elif isinstance(value, (tuple, list)):
            found |= formats_of(value, {})
        elif isinstance(value, torch.dtype):
            found.add(None)
    if kwargs:
        found |= formats_of(kwargs.values(), {})
        if kwargs.get("out") is not None:
            found.add(None)
    return found


def _on_data_only(handler: Handler) -> Handler:
    """Run `handler` only for the first argument: the op writes statistics into the others."""

    def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not args:
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        return handler(lambda data: func(data, *args[1:], **kwargs), args[:1], {})

    return run


def _holding_numbers(handler: Handler) -> Handler:
    """Run `handler` with the call's numbers held inside the format that its tensors then have."""

    def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
        return handler(partial(_call_with_held_numbers, func), args, kwargs)

    return run


def _without_fault(op: str, handler: Handler) -> Handler:
    """Run `handler`, but in fp32 with one rounding where the half kernel of `op` is wrong."""

    def call(func: Any, *args: Any, **kwargs: Any) -> Any:
        run = _run_widest_rounded if is_faulty(op, *args, **kwargs) else _run_as_is
        return run(func, args, kwargs)

    return lambda func, args, kwargs: handler(partial(call, func), args, kwargs)


def _run_as_is(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _run_fp32(func: Any, args: Args, kwargs: Kwargs) -> Any:
    formats = formats_of(args, kwargs)
    if formats.isdisjoint(HALF) or not formats.isdisjoint(HANDS_OFF):
        return func(*args, **kwargs)
    return call_with(widened, func, args, kwargs)


def _run_widest(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Widen half inputs if another input is fp32, or the other half format.

    A 0-d tensor beside larger ones counts as a number, as in PyTorch's promotion.
    """
    if len(formats_of(args, kwargs)) < 2:
        return func(*args, **kwargs)
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dtype in CASTABLE]
    operands = [tensor for tensor in tensors if tensor.dim()] or tensors
    if len({tensor.dtype for tensor in operands}) < 2:
        return func(*args, **kwargs)
    return _run_fp32(func, args, kwargs)


def _run_widest_rounded(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do as `_run_widest`, but half inputs on a CPU run in fp32, with one rounding."""
    operands = list(tensors_in((args, kwargs)))
    halves = {tensor.dtype for tensor in operands if tensor.dtype in HALF}
    if len(halves) != 1 or any(tensor.dtype == torch.float32 for tensor in operands):
        return _run_widest(func, args, kwargs)
    if operands[0].device.type != "cpu":
        return func(*args, **kwargs)
    half = halves.pop()
    return map_tensors(lambda tensor: rounded(tensor, half), _run_fp32(func, args, kwargs))


def _run_into(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Give every source the format of the tensor that is written, the first argument."""
    target, sources = args[0], (args[1:], kwargs)
    if target.dtype not in CASTABLE or formats_of(*sources) <= {target.dtype}:
        return func(*args, **kwargs)
    rest, named = cast_to(sources, target.dtype)
    return func(target, *rest, **named)


def _run_item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `x[key] = value`: the value is cast to what `x` can hold."""
    target, key, value = args
    value = _held(value, target.dtype)
    return _run_into(lambda target, value: func(target, key, value), (target, value), kwargs)


def _call_with_held_numbers(func: Any, *args: Any, **kwargs: Any) -> Any:
    formats = (tensor.dtype for tensor in tensors_in((args, kwargs)))
    dtype = kwargs.get("dtype") or next(formats, None)
    if dtype not in HALF:
        return func(*args, **kwargs)
    named = {name: _held(value, dtype) for name, value in kwargs.items()}
    return func(*(_held(value, dtype) for value in args), **named)


def _held(value: Any, dtype: torch.dtype) -> Any:
    """Clamp a finite number, or 0-d tensor, to the range of a half `dtype`."""
    if dtype not in HALF or isinstance(value, bool):
        return value
    end = torch.finfo(dtype).max
    if isinstance(value, (int, float)):
        return math.copysign(end, value) if end < abs(value) < math.inf else value
    if isinstance(value, Tensor) and value.dtype in CASTABLE - {dtype} and not value.dim():
        return torch.where(value.isinf(), value, value.clamp(-end, end))
    return value
