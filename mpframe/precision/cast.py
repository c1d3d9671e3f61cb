"""Applies a policy to every op of a block: the one place where tensors change format at run time.

`CastMode` is a `TorchFunctionMode`: PyTorch hands it each call a model makes, whatever its
spelling, before autograd records it. So the casts are part of the graph, and the backward pass
runs in the formats of the forward pass.

    half op    inputs rounded to half; on a CPU without half arithmetic the op then computes in
               fp32 and its result is rounded once (emulation.py)
    fp32 op    half inputs widened
    infer op   all inputs widened to the widest of them
    others     left alone, and opened where they are Python functions of torch (opening.py), so
               that the ops they call are seen too: attention, gumbel_softmax, `1 / x`, ...

What is never cast: integers, booleans, complex, float64 and float8 tensors, and the floating
tensors beside a float64 or complex one; ops given an explicit `dtype=`; in-place and `out=` forms,
whose result keeps the format of its tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpframe.precision.emulation import half_values, rounded
from mpframe.precision.opening import open_function
from mpframe.precision.policy import Compute, Policy
from mpframe.precision.tree import map_tensors, tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Plan = Callable[[Any, Args, Kwargs], Any]

CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})
_BEYOND = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})


class CastMode(TorchFunctionMode):
    """Casts the inputs of every op by the policy while it is active.

    Args:
        policy: what decides.
        device: where the model computes; decides whether half is emulated.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        super().__init__()
        self.policy = policy
        self.half = policy.half_dtype
        self.emulating = policy.emulates(device)
        self.pin: str | None = None
        self._weights: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._plans: dict[tuple[Any, str | None], Plan] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        plan = self._plans.get((func, self.pin))
        if plan is None:
            plan = self._plans[func, self.pin] = self._plan(func)
        return plan(func, args, kwargs or {})

    @contextmanager
    def pinned(self, pin: str) -> Iterator[None]:
        """Every op in the block runs as in a module pinned to `pin` (`fp32` or `half`)."""
        outer, self.pin = self.pin, pin
        try:
            yield
        finally:
            self.pin = outer

    def forget_weights(self) -> None:
        """Drop the kept casts of weights; a cast must never be older than its weight."""
        self._weights.clear()

    def _plan(self, func: Any) -> Plan:
        """How calls of `func` are run under the present pin; asked once for each function."""
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_")
        compute = Compute.PYTORCH if in_place else self.policy.compute_of(name, self.pin)
        if compute is Compute.HALF:
            return self._run_emulated if self.emulating else self._run_half
        if compute is Compute.FP32:
            return _run_fp32
        if compute is Compute.WIDEST:
            return _run_widest
        opened = open_function(func)
        return self._opened(opened) if opened else _run_as_is

    def _run_half(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if _hands_off(args, kwargs):
            return func(*args, **kwargs)
        return func(*map_tensors(self._as_half, args), **map_tensors(self._as_half, kwargs))

    def _run_emulated(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if _hands_off(args, kwargs):
            return func(*args, **kwargs)
        result = func(*map_tensors(self._as_half, args), **map_tensors(self._as_half, kwargs))
        return map_tensors(lambda tensor: rounded(tensor, self.half), result)

    def _opened(self, opened: Any) -> Plan:
        def run(_: Any, args: Args, kwargs: Kwargs) -> Any:
            with self:
                return opened(*args, **kwargs)

        return run

    def _as_half(self, tensor: Tensor) -> Tensor:
        """`tensor` as the half op wants it; a weight's cast is made once and kept for the block."""
        if tensor.dtype not in CASTABLE:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return self._cast(tensor)
        key = (id(tensor), torch.is_grad_enabled())
        if key not in self._weights:
            # The weight is kept beside its cast: an id is only unique while its object lives.
            self._weights[key] = (tensor, self._cast(tensor))
        return self._weights[key][1]

    def _cast(self, tensor: Tensor) -> Tensor:
        return half_values(tensor, self.half) if self.emulating else tensor.to(self.half)


def _run_as_is(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _run_fp32(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if _hands_off(args, kwargs):
        return func(*args, **kwargs)
    return func(*map_tensors(_widen, args), **map_tensors(_widen, kwargs))


def _run_widest(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Widen half inputs where another input is fp32 (or the other half format).

    A 0-d tensor does not count, as in PyTorch's promotion: it is a number, not an operand.
    """
    formats = {t.dtype for t in tensors_in((args, kwargs)) if t.dim() and t.dtype in CASTABLE}
    return (_run_fp32 if len(formats) > 1 else _run_as_is)(func, args, kwargs)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in CASTABLE else tensor


def _hands_off(args: Args, kwargs: Kwargs) -> bool:
    """True where the caller has fixed the format of the result."""
    if kwargs.get("out") is not None or kwargs.get("dtype") is not None:
        return True
    if any(isinstance(value, torch.dtype) for value in args):
        return True
    return any(tensor.dtype in _BEYOND for tensor in tensors_in((args, kwargs)))
