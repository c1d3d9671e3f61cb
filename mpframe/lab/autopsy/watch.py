"""Observes every op of one pass, forward and backward, and where a value first leaves the range.

A value leaves the range in an op whose inputs are finite and whose result is not. The ops after it
only pass it on. In the forward pass a `TorchFunctionMode` inside the cast block sees each call as
the model wrote it, and its result as the casts left it. In the backward pass each node of the graph
reports its incoming and outgoing gradients, and belongs to the op whose call made it:

    dL/dx = (dy/dx)^T dL/dy        finite dL/dy, infinite dL/dx: the op's backward made it

If the incoming gradient is the first that is not finite, the sum of the gradients from several
users of one tensor overflowed.

It keeps two facts about each tensor: the largest finite magnitude, and whether all are finite.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from mpframe.core.tree import tensors_in
from mpframe.precision.op_lists import op_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Magnitudes:
    """The magnitudes of some tensors together."""

    largest: float = 0.0  # finite, 0 if there is none
    infinite: bool = False
    nan: bool = False

    @property
    def finite(self) -> bool:
        return not (self.infinite or self.nan)

    def __or__(self, other: "Magnitudes") -> "Magnitudes":
        largest = max(self.largest, other.largest)
        return Magnitudes(largest, self.infinite or other.infinite, self.nan or other.nan)


def magnitudes_of(node: object) -> Magnitudes:
    """Measure every floating tensor in `node`, at any depth. Waits for the device."""
    found = Magnitudes()
    for values in floats_in(node):
        size = values.abs()
        largest = size.max()
        if bool(torch.isfinite(largest)):
            found |= Magnitudes(float(largest))
        else:
            largest = size.nan_to_num(0.0, 0.0, 0.0).max()
            found |= Magnitudes(float(largest), bool(size.isinf().any()), bool(size.isnan().any()))
    return found


def floats_in(node: object) -> Iterable[Tensor]:
    """Yield the values of the floating tensors in `node`, or the entries of sparse ones."""
    for tensor in tensors_in(node):
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        if values.dtype in _FLOATS and values.numel():
            yield values


def bad_rows(node: object, rows: int) -> list[int]:
    """Return the places along dimension 0, of length `rows`, that hold inf or NaN."""
    bad: set[int] = set()
    for values in floats_in(node):
        if values.dim() and len(values) == rows:
            flat = ~torch.isfinite(values).reshape(rows, -1).all(dim=1)
            bad.update(flat.nonzero().flatten().tolist())
    return sorted(bad)


OUTSIDE = "the loss"  # the ops after the model: the cast of its outputs to fp32, and the loss
_READS = frozenset({"__get__", "__getitem__", "detach", "register_hook"})


@dataclass(frozen=True)
class OpCall:
    """One call of an op in a pass, the same in every replay."""

    module: str  # the innermost one's qualified name, empty for the model, `OUTSIDE` after it
    op: str
    number: int = 0  # of the calls of that op in that module


@dataclass(frozen=True)
class Observation:
    """The magnitudes that went into and came out of one call, in one direction."""

    inputs: Magnitudes
    outputs: Magnitudes

    def __or__(self, other: "Observation") -> "Observation":
        return Observation(self.inputs | other.inputs, self.outputs | other.outputs)


@dataclass(frozen=True)
class FirstNonFinite:
    """A call in which a value first left the range."""

    call: OpCall
    direction: str  # `forward` or `backward`
    nan: bool  # and not infinite
    rows: tuple[int, ...] = ()  # places of the samples whose part of the result has it, if known


@dataclass(frozen=True)
class Count:
    """Elements of a gradient: how many are not 0, how many are in half's normal range."""

    nonzero: int
    normal: int
    narrow: bool  # stored in half


@dataclass
class Trace:
    """All that was observed in one pass, in the order it ran."""

    forward: dict[OpCall, Observation] = field(default_factory=dict)
    backward: dict[OpCall, Observation] = field(default_factory=dict)
    nonfinite: list[FirstNonFinite] = field(default_factory=list)
    gradients: dict[tuple[str, str, int, int], Count] = field(default_factory=dict)

    def observations(self, direction: str) -> dict[OpCall, Observation]:
        return self.forward if direction == "forward" else self.backward


class Watch(TorchFunctionMode):
    """A mode that fills a `Trace` of a pass over `rows` samples. Enter it in the cast block."""

    def __init__(self, model: nn.Module, half: torch.dtype, rows: int) -> None:
        super().__init__()
        self.trace = Trace()
        self._model = model
        self._half, self._rows = half, rows
        self._inside = [OUTSIDE]
        self._calls: Counter[tuple[str, str]] = Counter()
        self._owners: dict[Node, OpCall] = {}
        self._backward_finite = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            return func(*args, **kwargs)
        with _hide_ops():
            inputs = magnitudes_of((args, kwargs))
        result = func(*args, **kwargs)
        with _hide_ops():
            if any(True for _ in floats_in(result)):
                self._observe(op_name(func) or name, (args, kwargs), inputs, result)
        return result

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Context manager that assigns every op to the module that it runs in."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                for handle in self._follow(name, module):
                    stack.callback(handle.remove)
            yield

    def count_weights(self) -> None:
        """Count the weights' gradients, once the backward pass is over."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._count((name, "weight", 0, 0), parameter.grad)

    def _follow(self, name: str, module: nn.Module) -> list[Any]:
        def enter(_: nn.Module, args: Any) -> None:
            self._attribute(args, self._inside[-1], "")
            self._inside.append(name)

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            self._attribute(result, name, "")
            if self._inside[-1] == name:
                self._inside.pop()

        return [
            module.register_forward_pre_hook(enter, prepend=True),  # Before a pin casts the inputs.
            module.register_forward_hook(leave, always_call=True),
        ]

    def _observe(self, op: str, arguments: Any, inputs: Magnitudes, result: Any) -> None:
        module = self._inside[-1]
        call = OpCall(module, op, self._calls[module, op])
        self._calls[module, op] += 1
        outputs = magnitudes_of(result)
        self.trace.forward[call] = Observation(inputs, outputs)
        made = (outputs.infinite and inputs.finite) or (outputs.nan and not inputs.nan)
        if made and "empty" not in op and not _names_nonfinite(arguments):
            rows = tuple(bad_rows(result, self._rows))
            self.trace.nonfinite.append(FirstNonFinite(call, "forward", not outputs.infinite, rows))
        self._attribute(result, module, op, call.number)
        for number, tensor in enumerate(tensors_in(result)):
            if tensor.requires_grad:
                count = partial(self._count, (module, op, call.number, number))
                tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def _attribute(self, results: Any, module: str, op: str, call: int = 0) -> None:
        """Make every new node of the results' graph report as part of this call."""
        waiting = [tensor.grad_fn for tensor in tensors_in(results)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._owners or "AccumulateGrad" in node.name():
                continue
            # An autograd function of the user's own is visible only in the graph.
            named = issubclass(type(node), BackwardCFunction) or not op
            name = node.name().removesuffix("Backward") if named else op
            self._owners[node] = OpCall(module, name, call)
            node.register_hook(partial(self._observe_backward, node))
            waiting += [before for before, _ in node.next_functions]

    @torch.no_grad()
    def _observe_backward(self, node: Node, outgoing: Any, incoming: Any) -> None:
        call = self._owners[node]
        seen = Observation(magnitudes_of(incoming), magnitudes_of(outgoing))
        self.trace.backward[call] = self.trace.backward.get(call, seen) | seen
        if not self._backward_finite or (seen.inputs.finite and seen.outputs.finite):
            return
        self._backward_finite = False
        # A sum of finite gradients is not finite where its inputs are not.
        nan = not (seen.outputs if seen.inputs.finite else seen.inputs).infinite
        self.trace.nonfinite.append(FirstNonFinite(call, "backward", nan))

    @torch.no_grad()
    def _count(self, key: tuple[str, str, int, int], gradient: Tensor) -> None:
        values = next(iter(floats_in(gradient)), None)
        if values is None:
            return
        smallest = torch.finfo(self._half).smallest_normal
        self.trace.gradients[key] = Count(
            int(values.count_nonzero()),
            int((values.abs() >= smallest).sum()),
            values.dtype == self._half,
        )


def _names_nonfinite(node: Any) -> bool:
    """Return whether a plain number among the arguments is inf or NaN, as masks have."""
    if isinstance(node, float):
        return not math.isfinite(node)
    if isinstance(node, (tuple, list)):
        return any(map(_names_nonfinite, node))
    return isinstance(node, dict) and any(map(_names_nonfinite, node.values()))


@contextmanager
def _hide_ops() -> Iterator[None]:
    """Hide ops from modes and from autograd."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield
