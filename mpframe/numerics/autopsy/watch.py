"""Watches every op of one pass, forward and backward, and notes where a number left the range.

A value is *born* out of range in an op whose inputs were finite and whose result is not. Ops that
only pass it on are innocent. In the forward pass a `TorchFunctionMode` sees each call as the model
wrote it; standing inside the cast block, it sees results as the casts left them. In the backward
pass each node of the graph reports what came in and what goes out, and belongs to the op whose
call made it:

    dL/dx = (dy/dx)^T dL/dy        finite dL/dy, infinite dL/dx: the op's backward made it

Where the incoming gradient is not finite and none before it was, it is a sum that overflowed: of
the gradients from several users of one tensor.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from mpframe.numerics.autopsy.magnitudes import Magnitudes, bad_rows, floats_in, magnitudes_of
from mpframe.precision.spellings import op_name
from mpframe.tree import tensors_in

OUTSIDE = "the loss"  # What runs after the model: widening its outputs, and the loss.
_READS = frozenset({"__get__", "__getitem__", "detach", "register_hook"})


@dataclass(frozen=True)
class Place:
    """An op of a pass, the same in every replay of it.

    Attributes:
        module: qualified name of the innermost module; empty for the model, `OUTSIDE` after it.
        op: PyTorch's name.
        call: counts the calls of that op in that module, from 0.
    """

    module: str
    op: str
    call: int = 0


@dataclass(frozen=True)
class Sight:
    """What one op was given and gave, in one direction."""

    given: Magnitudes
    gave: Magnitudes

    def __or__(self, other: "Sight") -> "Sight":
        return Sight(self.given | other.given, self.gave | other.gave)


@dataclass(frozen=True)
class Birth:
    """Where a value left the range.

    Attributes:
        place: the op.
        direction: `forward` or `backward`.
        nan: the value is NaN, and not infinite.
        rows: samples of the batch in whose part of the result it stands, where that can be told.
        summed: it came as the sum of finite gradients.
    """

    place: Place
    direction: str
    nan: bool
    rows: tuple[int, ...] = ()
    summed: bool = False


@dataclass(frozen=True)
class Count:
    """Elements of a gradient: how many are not 0, how many stand in half's normal range.

    Attributes:
        narrow: the gradient is stored in half.
    """

    nonzero: int
    normal: int
    narrow: bool


@dataclass
class Trace:
    """All that was seen in one pass, in the order it ran."""

    forward: dict[Place, Sight] = field(default_factory=dict)
    backward: dict[Place, Sight] = field(default_factory=dict)
    births: list[Birth] = field(default_factory=list)
    gradients: dict[tuple[str, str, int, int], Count] = field(default_factory=dict)

    def sights(self, direction: str) -> dict[Place, Sight]:
        """Those of a direction."""
        return self.forward if direction == "forward" else self.backward

    def born(self, direction: str) -> list[Birth]:
        """The births of a direction."""
        return [birth for birth in self.births if birth.direction == direction]


class Watch(TorchFunctionMode):
    """Fills a `Trace`. Open it within the cast block for the forward pass and around the loss.

    Args:
        model: its modules are hooked within `modules()`.
        half: the run's half format, by whose normal range gradients are counted.
        rows: samples in the batch.
    """

    def __init__(self, model: nn.Module, half: torch.dtype, rows: int) -> None:
        super().__init__()
        self.trace = Trace()
        self._model = model
        self._half, self._rows = half, rows
        self._inside = [OUTSIDE]
        self._calls: Counter[tuple[str, str]] = Counter()
        self._owners: dict[Node, Place] = {}
        self._backward_finite = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            return func(*args, **kwargs)
        with _unseen():
            given = magnitudes_of((args, kwargs))
        result = func(*args, **kwargs)
        with _unseen():
            if any(True for _ in floats_in(result)):
                self._see(op_name(func) or name, (args, kwargs), given, result)
        return result

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Within the block every op is known by the module it runs in."""
        handles = []
        for name, module in self._model.named_modules():
            handles += self._follow(name, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count_weights(self) -> None:
        """Count the weights' gradients, once the backward pass is over."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._count((name, "weight", 0, 0), parameter.grad)

    def _follow(self, name: str, module: nn.Module) -> list[Any]:
        def enter(_: nn.Module, args: Any) -> None:
            self._claim(args, self._inside[-1], "")
            self._inside.append(name)

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            self._claim(result, name, "")
            if self._inside[-1] == name:
                self._inside.pop()

        return [
            module.register_forward_pre_hook(enter, prepend=True),  # Before a pin casts the inputs.
            module.register_forward_hook(leave, always_call=True),
        ]

    def _see(self, op: str, arguments: Any, given: Magnitudes, result: Any) -> None:
        module = self._inside[-1]
        place = Place(module, op, self._calls[module, op])
        self._calls[module, op] += 1
        gave = magnitudes_of(result)
        self.trace.forward[place] = Sight(given, gave)
        if _is_birth(op, arguments, given, gave):
            rows = tuple(bad_rows(result, self._rows))
            self.trace.births.append(Birth(place, "forward", not gave.infinite, rows))
        self._claim(result, module, op, place.call)
        for number, tensor in enumerate(tensors_in(result)):
            if tensor.requires_grad:
                count = partial(self._count, (module, op, place.call, number))
                tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def _claim(self, results: Any, module: str, op: str, call: int = 0) -> None:
        """Let every new node of the results' graph report as part of this op."""
        waiting = [tensor.grad_fn for tensor in tensors_in(results)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._owners or "AccumulateGrad" in node.name():
                continue
            # A function of the user's own shows itself in the graph alone.
            own = node.name().removesuffix("Backward") if _is_users(node) or not op else op
            self._owners[node] = Place(module, own, call)
            node.register_hook(partial(self._see_backward, node))
            waiting += [before for before, _ in node.next_functions]

    @torch.no_grad()
    def _see_backward(self, node: Node, outgoing: Any, incoming: Any) -> None:
        place = self._owners[node]
        sight = Sight(magnitudes_of(incoming), magnitudes_of(outgoing))
        seen = self.trace.backward.get(place)
        self.trace.backward[place] = sight if seen is None else seen | sight
        if not self._backward_finite or (sight.given.finite and sight.gave.finite):
            return
        self._backward_finite = False
        summed = not sight.given.finite
        nan = not (sight.given if summed else sight.gave).infinite
        self.trace.births.append(Birth(place, "backward", nan, summed=summed))

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


def _is_users(node: Node) -> bool:
    return isinstance(node, BackwardCFunction)


def _is_birth(op: str, arguments: Any, given: Magnitudes, gave: Magnitudes) -> bool:
    """True where inf or NaN came out of what had none, and nobody asked for it."""
    if gave.nan and not given.nan and "empty" not in op:
        return not _names_nonfinite(arguments)
    made = gave.infinite and given.finite and "empty" not in op
    return made and not _names_nonfinite(arguments)


def _names_nonfinite(node: Any) -> bool:
    """True where a plain number among the arguments is inf or NaN: a mask's, not an accident."""
    if isinstance(node, float):
        return node != node or node in (float("inf"), float("-inf"))
    if isinstance(node, (tuple, list)):
        return any(map(_names_nonfinite, node))
    return isinstance(node, dict) and any(map(_names_nonfinite, node.values()))


@contextmanager
def _unseen() -> Iterator[None]:
    """Within the block no mode sees what is computed, and no graph is made of it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield
