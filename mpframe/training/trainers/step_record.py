"""A record of the ops that a step runs, as a graph that can be run again, or compiled.

Inside a `Recorder` the step runs as always, and each op is noted below autograd and the casts: the
ops of the backward pass and of the optimizer are in the record like all others. The record computes
with what the step computed with, by its place: the weights, a batch. Numbers of Python stand in it
as they were. So it is refused to read a tensor's numbers, on which Python could depend, and two
records of the same step must have the same ops.

Other code may change between two steps what a step takes from Python: attributes and hooks of
modules, an objective's attributes, the plan. Then the step needs another record. So every step
looks first whether any place has another object, which is quick, and only then at the values
(`Watcher`). What is inside of a list, a dict or another object is not looked at.
"""

import operator
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.core.errors import ConfigError
from mpframe.core.tree import map_tensors, tensors_in

# They read or write the memory of a tensor without an op.
_BESIDE_OPS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "apply_", "map_", "map2_")
)
_OURS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def refused(what: str) -> ConfigError:
    """Return the error for a step that cannot be one graph."""
    return ConfigError(f"trainer.compile=step: {what}; use trainer.compile=true")


@dataclass
class StepRecord:
    """The ops of a step, its outputs, and the tensors beside its inputs that it computed with."""

    graph: fx.GraphModule
    constants: list[Tensor]
    results: Any  # a tree of tensors, as the step gave it
    run: Callable[..., Sequence[Tensor]]

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Run the step on inputs in the places of the recorded ones, and return its results."""
        with torch.no_grad():
            found = iter(self.run(*inputs, *self.constants))
        return map_tensors(lambda _: next(found), self.results)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Run the graph by Inductor from now on, with torch's own random numbers."""
        from torch._inductor import compile as compile_graph  # It loads the compiler.

        examples: list[Any] = [tensor.detach() for tensor in (*inputs, *self.constants)]
        with torch.no_grad():
            self.run = compile_graph(self.graph, examples, {"fallback_random": True})

    def refuse_unless_equal(self, other: "StepRecord") -> None:
        """Raise ConfigError if another record of the same step has other ops or constants."""
        for mine, others in zip(_lines(self.graph), _lines(other.graph), strict=False):
            if mine != others:
                raise refused(f"two steps ran other ops ({mine}, then {others})")
        pairs = zip(self.constants, other.constants, strict=True)
        if not all(a is b or torch.equal(a, b) for a, b in pairs):
            raise refused("two steps computed with other numbers of Python")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that runs every op and records it.

    ConfigError: an op gives Python a number, or a shape that depends on one, moves memory, or makes
    a sparse tensor. `inputs` are the tensors that differ from step to step, each once.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._nodes: Any = WeakTensorKeyDictionary()
        self._inputs: list[fx.Node] = []
        self._constants: list[tuple[Tensor, int]] = []  # with their versions when they were met
        for tensor in inputs:
            self._add_input(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        _refuse(func, args)
        if func is torch.ops.aten.lift_fresh.default:
            made = func(*args)  # by `torch.tensor`; the record makes a new one from a constant
            node = self._note(made.clone())
            self._nodes[made] = self._graph.call_function(torch.ops.aten.clone.default, (node,))
            return made
        noted = tree_map(self._note, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        self._track(result, self._graph.call_function(func, *noted))
        return result

    def finish(self, results: Any) -> StepRecord:
        """Return the record of a step with these results, a tree of tensors."""
        self._graph.output(tuple(self._note(tensor) for tensor in tensors_in(results)))
        if any(tensor._version != version for tensor, version in self._constants):
            what = "a step writes into a tensor that is no parameter, buffer or optimizer state"
            raise refused(what)
        graph = fx.GraphModule(nn.Module(), self._graph)
        return StepRecord(graph, [tensor for tensor, _ in self._constants], results, graph)

    def _add_input(self, tensor: Tensor) -> None:
        with self._graph.inserting_after(self._inputs[-1] if self._inputs else None):
            self._nodes[tensor] = self._graph.placeholder(f"input_{len(self._inputs)}")
        self._inputs.append(self._nodes[tensor])

    def _note(self, value: Any) -> Any:
        """Return an argument as the graph has it: the node of a tensor, else the value itself."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            self._constants.append((value, value._version))
            self._add_input(value)
        return self._nodes[value]

    def _track(self, result: Any, node: fx.Node) -> None:
        """Remember the node of each tensor in a result. An op in place returns its argument."""
        if isinstance(result, Tensor):
            if result.layout is not torch.strided:
                raise refused(f"a tensor is sparse ({node.target})")
            self._nodes.setdefault(result, node)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, Tensor) and item not in self._nodes:
                    self._track(item, self._graph.call_function(operator.getitem, (node, index)))


class RefuseReads(TorchFunctionMode):
    """Context manager that raises ConfigError where Python looks into a tensor's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BESIDE_OPS:
            raise refused(f"a number is read from a tensor ({func.__name__.strip('_')}{_where()})")
        return func(*args, **(kwargs or {}))


def _lines(graph: fx.GraphModule) -> list[str]:
    return [node.format_node() or node.name for node in graph.graph.nodes]


def _refuse(func: Any, args: Any) -> None:
    """Raise ConfigError for an op whose record would be wrong in another step."""
    name = func.overloadpacket.__name__
    untagged = name in ("_pack_padded_sequence", "_ctc_loss")
    if torch.Tag.data_dependent_output in func.tags or untagged:
        raise refused(f"a number is read from a tensor ({name.strip('_')}{_where()})")
    by_mask = name not in ("index", "_unsafe_index") or any(
        tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1])
    )
    if torch.Tag.dynamic_output_shape in func.tags and by_mask:
        raise refused(f"a shape depends on the numbers of a tensor ({name}{_where()})")
    if name in ("set_", "resize_", "resize_as_"):
        raise refused(f"a tensor gets other memory ({name}{_where()})")


def _where() -> str:
    """Return the innermost line outside of torch and mpframe."""
    frames = (f for f in reversed(traceback.extract_stack()) if not f.filename.startswith(_OURS))
    return next((f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames), "")


@dataclass(frozen=True)
class PythonState:
    """Numbers, words and flags, and the ids of all other objects."""

    values: tuple[Any, ...]
    objects: list[Any] = field(compare=False)  # While they live, no other object has the same id.
    hashed: int = field(compare=False)  # Thousands of values take long.

    def __hash__(self) -> int:
        return self.hashed


class Watcher:
    """Looks at the Python state of a model and its objective."""

    def __init__(self, model: nn.Module, objective: Any) -> None:
        owner = getattr(objective, "__self__", objective)  # The object of a method.
        held = getattr(owner, "__dict__", None)
        self._own: dict[str, Any] = held if isinstance(held, dict) else {}
        self._roots = [model, owner, *self._own.values()]
        self._find_homes()
        self._last = PythonState((), [], 0)

    def look(self, plan: Any) -> PythonState:
        """Return the state now, with a plan: the last one if nothing has changed."""
        objects, last = self._objects(plan), self._last.objects
        if len(objects) != len(last) or not all(map(operator.is_, objects, last)):
            self._find_homes()  # A module may have been replaced.
            objects = self._objects(plan)
            values = tuple([(type(o), o) if type(o) in _BY_VALUE else id(o) for o in objects])
            self._last = PythonState(values, objects, hash(values))
        return self._last

    def _find_homes(self) -> None:
        roots = [root for root in self._roots if isinstance(root, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        attributes = [self._own, *map(vars, modules)]
        self._homes = attributes + [module._modules for module in modules if module._modules]
        self._hooks = [vars(module).get(name, ()) for module in modules for name in _HOOKS]

    def _objects(self, plan: Any) -> list[Any]:
        homes = map(dict.values, (*self._homes, vars(plan)))
        return [*chain.from_iterable(homes), *chain.from_iterable(self._hooks)]
