"""Which ops read each weight, seen in one forward pass.

A weight that only half ops read may be stored in half: the ops get the same numbers whether it is
rounded once, when it is stored, or at each read. A module's class does not say which ops these are.
An expert layer multiplies slices of one large weight, and weight standardisation subtracts a mean
before the convolution.

An op that only moves values does not count as a reader, because a rounded weight's view, copy or
concatenation is the same as a rounded one. The ops that read the result count.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mpframe.core.buffers import ModuleState
from mpframe.core.tree import tensors_in
from mpframe.precision.handlers import HANDS_OFF
from mpframe.precision.op_lists import WITH_STATISTICS, op_name
from mpframe.precision.policy import Compute, Policy

# Ops that return their first argument's values in a new tensor.
_MOVE_NAMES = "cat clone contiguous flatten reshape stack bfloat16 float half to type type_as"
_MOVES = frozenset(_MOVE_NAMES.split())
# Calls that read attributes only, as `zeros_like`, `new_zeros` and their like do.
_NO_READS = frozenset({"__get__", "__set__", "requires_grad_"})


@dataclass(frozen=True, order=True)
class Use:
    """An op that reads a weight."""

    op: str
    """Its name in the lists, if any, or `uncast ...` beside complex or double inputs."""
    within: tuple[str, ...]
    """The modules that were running, the outermost first."""

    def pin(self, policy: Policy) -> str | None:
        """Return the pin of the innermost module that has one."""
        pins = (policy.pin_of(module) for module in reversed(self.within))
        return next((pin[1] for pin in pins if pin is not None), None)

    def compute(self, policy: Policy) -> Compute:
        """Return the format the op computes in."""
        return policy.compute_of(self.op, self.pin(policy))

    def in_half(self, policy: Policy) -> bool:
        """Return whether the op computes in half, its weights included."""
        return self.op not in WITH_STATISTICS and self.compute(policy) is Compute.HALF


@dataclass
class WeightUses:
    """The ops that read each weight, and the names of the modules that were called, in a trace."""

    by_weight: dict[nn.Parameter, set[Use]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


def trace(model: nn.Module, example: Any, casts: Any, uses: WeightUses) -> None:
    """Run the model once, uncompiled, and add to `uses` what reads its weights.

    Its state is restored. The `cast` block unwraps functions of torch, so that the ops inside are
    seen.
    """
    recorder, eager = _UseRecorder(model, uses), nullcontext()
    if "torch._dynamo" in sys.modules:  # The import takes seconds.
        eager = torch.compiler.set_stance("force_eager")
    with preserve_state(model), eager, recorder.calls(model), recorder, casts:
        _call(model, example)


def initialize_lazy(model: nn.Module, example: Any) -> None:
    """Give lazy layers their shapes and first values. The buffers of other modules stay."""
    if not any(map(is_lazy, model.parameters())):
        return
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad(), ModuleState.of(model):
            _call(model.eval(), example)
    finally:
        for module in training:
            module.training = True


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, FunctionType | partial):
        example(model)
    elif isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, tuple) else (example,)))


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Context manager that runs `model` and then restores its parameters, its buffers, the plain
    attributes of its modules and the random generators of Python, NumPy and torch."""
    kept = [(p, p.data, p.detach().clone()) for p in model.parameters() if _has_values(p)]
    numpy: Any = sys.modules.get("numpy")  # If nobody imported it, nothing draws from it.
    with ExitStack() as stack:
        stack.enter_context(ModuleState.of(model))
        stack.callback(random.setstate, random.getstate())
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng(list(range(torch.cuda.device_count()))))
        stack.callback(_restore_parameters, kept)
        yield


def _has_values(parameter: nn.Parameter) -> bool:
    lacks = is_lazy(parameter) or hasattr(parameter, "fake_mode")
    return not lacks and parameter.layout is torch.strided


def _restore_parameters(kept: Iterable[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    # They stay where they are in memory, because a trace knows a weight by its address.
    for parameter, data, values in kept:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data
        if not torch.equal(data, values):
            data.copy_(values)


class _UseRecorder(TorchFunctionMode):
    """A function mode that notes every op that gets a weight, known by its address."""

    def __init__(self, model: nn.Module, uses: WeightUses) -> None:
        super().__init__()
        self._uses = uses
        self._weights: dict[int, set[nn.Parameter]] = {}  # by address
        self._within: list[str] = []
        self._copies: list[Tensor] = []  # Kept, so that their memory is not reused.
        for parameter in model.parameters():
            self._weights.setdefault(_address(parameter), set()).add(parameter)
        self._weights.pop(0, None)  # Without an address they cannot be told apart.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = op_name(func)
        if name not in _NO_READS and not name.startswith("new_") and not name.endswith("_like"):
            first_only = args and (name in _MOVES or name.endswith("_as"))
            self._note(name, args[:1] if first_only else (args, kwargs), result)
        return result

    @contextmanager
    def calls(self, model: nn.Module) -> Iterator[None]:
        """Context manager that follows which modules are being called."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if isinstance(module, ScriptModule):  # It takes no hooks, so it counts as called.
                    self._uses.called.add(name)
                    continue
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def _enter(self, name: str, *_: Any) -> None:
        self._uses.called.add(name)
        self._within.append(name)

    def _leave(self, *_: Any) -> None:
        self._within.pop()

    def _note(self, op: str, inputs: Any, result: Any) -> None:
        sources = {a for a in map(_address, tensors_in(inputs)) if a in self._weights}
        results = list(tensors_in(result))
        if not sources or not (results or op == "__setitem__"):
            return
        in_place = op.startswith("__i") or (op.endswith("_") and not op.endswith("__"))
        if not sources.isdisjoint(map(_address, results)) and not in_place:
            return  # A view has the address of its weight, so the ops that read it are noted.
        weights = {weight for source in sources for weight in self._weights[source]}
        if op in _MOVES:
            self._weights |= {address: weights for address in map(_address, results) if address}
            self._copies += results
            return
        uncast = any(tensor.dtype in HANDS_OFF for tensor in tensors_in(inputs))
        use = Use(f"uncast {op}" if uncast else op, tuple(self._within))
        for weight in weights:
            self._uses.by_weight.setdefault(weight, set()).add(use)


def _address(tensor: Tensor) -> int:
    """Return the address that a tensor shares with its views, with values or not, 0 if sparse."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # Sparse, or wrapped by a transform.
        return 0
