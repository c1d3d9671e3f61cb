"""Which ops read each weight, seen in one forward pass.

A weight that only half ops read may be stored in half: whether it is rounded once, when it is
stored, or again at each read, the op gets the same numbers. A module's class does not say which ops
these are. An expert layer multiplies slices of one large weight; a layer with weight
standardisation subtracts a mean from its weight before it convolves.

An op that only moves values does not count as a reader. The view, copy or concatenation of a
rounded weight equals the rounded view, copy or concatenation. The ops that read the result count.

The model runs inside `undisturbed`, which restores all that a forward pass changes.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mpframe.core.buffers import State
from mpframe.core.handlers import HANDS_OFF
from mpframe.core.op_lists import op_name
from mpframe.core.storage import Use, WeightUses
from mpframe.core.tree import tensors_in


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context manager that runs `model` and then restores its parameters, its buffers, the plain
    attributes of its modules and the random generators."""
    with State.of(model), _same_parameters(model), _same_random_numbers():
        yield


@contextmanager
def _same_parameters(model: nn.Module) -> Iterator[None]:
    """Put back parameters that the block writes, as a layer does that takes its first values from
    its first batch. They stay where they are in memory, by which their readers are known."""
    kept = [(p, p.data, p.detach().clone()) for p in model.parameters() if not is_lazy(p)]
    try:
        yield
    finally:
        for parameter, data, values in kept:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if not torch.equal(data, values):
                data.copy_(values)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """The block may draw random numbers; those drawn after it are the same as without it."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    numpy: Any = sys.modules.get("numpy")  # Nothing is drawn from it where nobody imported it.
    python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(of_numpy)


# Ops that give the values of their first argument in a tensor of their own.
_MOVES = frozenset(
    {"cat", "clone", "contiguous", "flatten", "reshape", "stack"}
    | {"bfloat16", "float", "half", "to", "type", "type_as"}
)
# Ops that look at a tensor's shape or format, or mark it; so do `zeros_like`, `new_zeros`, ...
_LOOKS = frozenset({"__get__", "__set__", "requires_grad_"})


def trace(model: nn.Module, example: Any, casts: AbstractContextManager[None]) -> WeightUses:
    """Run the model once as it is and see what reads its weights.

    Args:
        model: put back as it was, buffers and plain attributes too; so are random generators.
        example: what it is called with: a tuple is its arguments, a mapping its keyword arguments,
            anything else its only argument; a function is called with the model, and runs it.
        casts: the block in which ops are cast, so that functions of torch are unwrapped.
    """
    watch = _Watch(model)
    with undisturbed(model), _uncompiled(), watch.calls(model), watch, casts:
        call_model(model, example)
    return watch.uses()


def materialize(model: nn.Module, example: Any) -> None:
    """Give lazy layers their shapes and first values by one call of the model, without training.

    Buffers and plain attributes of the other modules stay as they are. A model without lazy layers
    is not called.
    """
    if not any(map(is_lazy, model.parameters())):
        return
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), State.of(model):
            call_model(model.eval(), example)
    finally:
        for module, training in modes.items():
            module.training = training


def call_model(model: nn.Module, example: Any) -> Any:
    """The model's outputs on an example, as `trace` takes it."""
    if isinstance(example, FunctionType | partial):
        return example(model)
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, Mapping) else model(example)


class _Watch(TorchFunctionMode):
    """Notes every op that is given a weight's values, by the memory that they lie in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights: dict[int, set[nn.Parameter]] = {}
        self._uses: dict[nn.Parameter, set[Use]] = {}
        self._called: set[str] = set()
        self._within: list[str] = []
        self._copies: list[Tensor] = []  # Kept, so that their memory is not used again.
        for parameter in model.parameters():
            self._weights.setdefault(_address(parameter), set()).add(parameter)
        self._weights.pop(0, None)

    def uses(self) -> WeightUses:
        """All that was seen."""
        by_weight = {weight: frozenset(uses) for weight, uses in self._uses.items()}
        return WeightUses(by_weight, frozenset(self._called))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = op_name(func)
        if not _only_looks(name):
            self._note(name, args[:1] if _first_only(name) and args else (args, kwargs), result)
        return result

    @contextmanager
    def calls(self, model: nn.Module) -> Iterator[None]:
        """Within the block the watch follows which modules are being called."""
        hooks = []
        for name, module in model.named_modules():
            if isinstance(module, ScriptModule):  # It takes no hooks, and may have been called.
                self._called.add(name)
            else:
                hooks += self._around(name, module)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _around(self, name: str, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._called.add(name)
            self._within.append(name)

        def leave(*_: Any) -> None:
            self._within.pop()

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _note(self, op: str, given: Any, result: Any) -> None:
        sources = {a for a in map(_address, tensors_in(given)) if a in self._weights}
        results = list(tensors_in(result))
        if not sources or not (results or op == "__setitem__"):
            return
        if not sources.isdisjoint(map(_address, results)) and not _writes(op):
            return  # A view.
        weights = {weight for source in sources for weight in self._weights[source]}
        if op in _MOVES:
            self._follow(weights, results)
            return
        uncast = any(tensor.dtype in HANDS_OFF for tensor in tensors_in(given))
        use = Use(f"uncast {op}" if uncast else op, tuple(self._within))
        for weight in weights:
            self._uses.setdefault(weight, set()).add(use)

    def _follow(self, weights: set[nn.Parameter], copies: list[Tensor]) -> None:
        self._weights |= {address: weights for address in map(_address, copies) if address}
        self._copies += copies


def _only_looks(op: str) -> bool:
    return op in _LOOKS or op.startswith("new_") or op.endswith("_like")


def _first_only(op: str) -> bool:
    """True if `op` takes no values but its first argument's."""
    return op in _MOVES or op.endswith("_as")


def _writes(op: str) -> bool:
    """True for in-place forms, whose result is their argument."""
    return op.startswith("__i") or (op.endswith("_") and not op.endswith("__"))


def _address(tensor: Tensor) -> int:
    """Where the tensor's memory begins, the same for all views of it; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # Sparse, or wrapped by a transform.
        return 0


def _uncompiled() -> AbstractContextManager[Any]:
    """Within the block compiled parts run as they are written."""
    if "torch._dynamo" not in sys.modules:  # Nothing is compiled; the import takes seconds.
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
