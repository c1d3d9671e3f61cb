"""How one call is run: a handler for each rule of the lists.

    half            inputs rounded to half, by the cast mode, which keeps the casts of weights
    fp32            half inputs widened
    widest input    half inputs widened if another input is fp32
    as PyTorch      nothing is cast
    into            a write in place: sources take the format of the target
    item            `x[key] = value`, for which the same holds

Some ops need more than their rule, which `adapt` adds. Never cast are integers, booleans, complex,
float64 and float8 tensors, the floating tensors beside a float64 or complex one, ops given an
explicit `dtype=` or `out=`, and running statistics.

`OpHandler` is the interface for running ops in another way, such as products below 16 bits.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from mpframe.core.tree import HALF, call_with, is_simple, map_tensors, tensors_in, to_fp32
from mpframe.precision.emulation import FAULTY, WITHOUT_HALF_KERNEL, is_faulty, round_to
from mpframe.precision.op_lists import WITH_STATISTICS, op_name
from mpframe.precision.policy import CASTABLE, Compute, Policy
from mpframe.precision.torch_functions import unwrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]
"""Runs the function that was called on its arguments, of which none is cast yet."""
Rule = Callable[[Any, Any, Args, Kwargs], Any]
"""The same, with the cast mode as its first argument."""
Readers = Iterable[tuple[str, str | None]]
"""The ops that read a layer's weights, each with the pin of the module that it runs in."""


class OpHandler:
    """The base class for `Precision(..., op_handlers=[...])`. Override what you need."""

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        """Return a function that runs an op, or None to leave the op to the lists.

        The answer is cached. While the function runs, nothing is cast. If it returns
        NotImplemented, the lists decide about that call.

        Args:
            op: its name, as the lists write it.
            recipe: the recipe's name, from the module's pin or `dtype.products`, if there is one.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Check a model before it runs, and raise for what its device cannot do."""

    def describe(self, name: str, module: nn.Module, op: str | None, readers: Readers) -> str:
        """Return how a layer runs, in words for the dtype map, if there is anything to add."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what is carried from step to step, under names that no other handler uses."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The names may be missing."""


# In-place ops that torch runs only if the sources have the format of the tensor they write.
_WRITES_ONE_FORMAT = """
    addbmm_ addmm_ addmv_ baddbmm_ heaviside_ index_add_ index_copy_ index_put_ index_reduce_ lerp_
    masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_
"""
# Ops that write a number into a tensor or clamp to it, and raise if the tensor cannot hold it.
_WRITES_A_NUMBER = """
    clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ constant_pad_nd fill fill_
    fill_diagonal_ full full_like hardtanh hardtanh_ index_fill index_fill_ masked_fill masked_fill_
    new_full pad pad_sequence scatter scatter_ threshold threshold_
"""
# Frequent calls that torch.autocast does not cast, nor any op inside: it need not be turned off.
_NOT_AUTOCAST = """
    __add__ __get__ __getitem__ __mul__ __radd__ __rmul__ __set__ __sub__ __truediv__ add contiguous
    _enter_autocast _exit_autocast div expand flatten float gelu mul permute relu reshape silu size
    sub to transpose unsqueeze view
"""
WRITES_ONE_FORMAT = frozenset(_WRITES_ONE_FORMAT.split())
WRITES_A_NUMBER = frozenset(_WRITES_A_NUMBER.split())
NOT_AUTOCAST = frozenset(_NOT_AUTOCAST.split())
# None: the caller asks for a format, with `dtype=` or `out=`.
HANDS_OFF = frozenset({None, torch.float64, torch.complex32, torch.complex64, torch.complex128})

_data: Any = torch._C.TensorBase.data
_DATA = (_data.__get__, _data.__set__)  # reads of `.data`, and `.data = ...`
AS_IS = Compute.PYTORCH.value


def choose(policy: Policy, func: Any, pin: str | None) -> tuple[str, str, bool]:
    """Return an op's name, the rule that runs it, and whether torch.autocast may stay on.

    A function of torch that is unwrapped has its name in `UNWRAPPED` for a rule.
    """
    op = op_name(func)
    if policy.mode == "fp32":
        return op, _choose_unlisted(func) or AS_IS, True
    rule = "into" if op in WRITES_ONE_FORMAT else policy.compute_of(op, pin).value
    if op == "__setitem__":
        rule = "item"
    unlisted = _choose_unlisted(func) if rule == AS_IS and op not in WRITES_A_NUMBER else None
    return op, unlisted or rule, unlisted is not None or op in NOT_AUTOCAST


def _choose_unlisted(func: Any) -> str | None:
    if isinstance(func, HigherOrderOperator):
        return "higher order"
    return "data" if func in _DATA else unwrap(func)


def adapt(run: Rule, op: str, rule: str) -> Rule:
    """Return what runs a rule, with what `op` needs besides."""
    if rule == "widest input" and op in WITHOUT_HALF_KERNEL:
        return _run_widest_rounded
    if rule == "half" and op in FAULTY:
        return partial(_avoid_fault, run, op)
    if rule in ("half", "fp32") and op in WITH_STATISTICS:
        return partial(_cast_data_only, run)
    return partial(_hold_numbers, run) if op in WRITES_A_NUMBER else run


def cast_to(node: Any, dtype: torch.dtype) -> Any:
    """Cast each tensor in `node` to `dtype`, except formats that are never cast."""
    return map_tensors(lambda t: t.to(dtype) if t.dtype in CASTABLE else t, node)


def dtypes_in(args: Iterable[Any], kwargs: Kwargs) -> set[torch.dtype | None]:
    """Return the formats of a call's tensors, and None if the caller fixes the result's."""
    found: set[torch.dtype | None] = set()
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif isinstance(value, (tuple, list)) and not is_simple(value):
            found |= dtypes_in(value, {})
        elif isinstance(value, torch.dtype):
            found.add(None)
    return found if kwargs.get("out") is None else {*found, None}


def _cast_data_only(run: Rule, mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Show `run` the first argument only: the op writes statistics into the others."""
    if not args:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    return run(mode, lambda data: func(data, *args[1:], **kwargs), args[:1], {})


def _hold_numbers(run: Rule, mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Clamp the numbers in a call to the format that its tensors are cast to."""

    def call(*args: Any, **kwargs: Any) -> Any:
        formats = (tensor.dtype for tensor in tensors_in((args, kwargs)))
        dtype = kwargs.get("dtype") or next(formats, None)
        named = {name: _hold(value, dtype) for name, value in kwargs.items()}
        return func(*(_hold(value, dtype) for value in args), **named)

    return run(mode, call, args, kwargs)


def _avoid_fault(run: Rule, op: str, mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run calls that torch's half kernel gets wrong in fp32, with one rounding."""
    if is_faulty(op, *args, **kwargs):
        return run(mode, lambda *a, **k: _run_widest_rounded(mode, func, a, k), args, kwargs)
    return run(mode, func, args, kwargs)


def _run_as_is(_: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _run_fp32(_: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    formats = dtypes_in(args, kwargs)
    if formats.isdisjoint(HALF) or not formats.isdisjoint(HANDS_OFF):
        return func(*args, **kwargs)
    return call_with(to_fp32, func, args, kwargs)


def _run_widest(mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Widen half inputs if another input is fp32, or the other half format.

    A 0-d tensor beside larger ones counts as a Python number, as in PyTorch's promotion.
    """
    if len(dtypes_in(args, kwargs)) < 2:
        return func(*args, **kwargs)
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dtype in CASTABLE]
    operands = [tensor for tensor in tensors if tensor.dim()] or tensors
    if len({tensor.dtype for tensor in operands}) < 2:
        return func(*args, **kwargs)
    return _run_fp32(mode, func, args, kwargs)


def _run_widest_rounded(mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do as `_run_widest`, but if all inputs are half, run in fp32 on a CPU, with one rounding."""
    operands = list(tensors_in((args, kwargs)))
    halves = {tensor.dtype for tensor in operands if tensor.dtype in HALF}
    if len(halves) != 1 or any(tensor.dtype == torch.float32 for tensor in operands):
        return _run_widest(mode, func, args, kwargs)
    if operands[0].device.type != "cpu":
        return func(*args, **kwargs)
    half = halves.pop()
    return map_tensors(lambda tensor: round_to(tensor, half), _run_fp32(mode, func, args, kwargs))


def _run_into(_: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cast every source to the format of the first argument, which is written."""
    target, sources = args[0], (args[1:], kwargs)
    if target.dtype not in CASTABLE or dtypes_in(*sources) <= {target.dtype}:
        return func(*args, **kwargs)
    rest, named = cast_to(sources, target.dtype)
    return func(target, *rest, **named)


def _run_item(mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `x[key] = value`: the value is cast to what `x` can hold."""
    target, key, value = args
    sources = target, _hold(value, target.dtype)
    return _run_into(mode, lambda target, value: func(target, key, value), sources, kwargs)


def _hold(value: Any, dtype: torch.dtype | None) -> Any:
    """Clamp a finite number, or 0-d tensor, to the range of a half `dtype`."""
    if dtype not in HALF or isinstance(value, bool):
        return value
    end = torch.finfo(dtype).max
    if isinstance(value, (int, float)):
        return math.copysign(end, value) if end < abs(value) < math.inf else value
    if isinstance(value, Tensor) and value.dtype in CASTABLE - {dtype} and not value.dim():
        return torch.where(value.isinf(), value, value.clamp(-end, end))
    return value


RULES: dict[str, Rule] = {
    "fp32": _run_fp32,
    "widest input": _run_widest,
    AS_IS: _run_as_is,
    "into": _run_into,
    "item": _run_item,
}
"""All rules except half, which needs the cast mode."""
