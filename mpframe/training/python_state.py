"""What a step takes from Python: attributes and hooks of modules, an objective's, and the plan.

A record of a step has them as constants. Other code may change them between two steps, such as the
rate of a dropout or the weight of a loss, and then the step needs another record. So every step
looks first whether any place has another object, which is quick, and only then at the values.

What is inside of a list, a dict or another object is not looked at.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None)})


class PythonState:
    """The objects in all places. Equal to another one whose numbers, words and flags are equal, and
    whose other objects are the same.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects  # While they live, no other object has the same id.
        self._values = tuple([_value(item) for item in objects])
        self._hash = hash(self._values)

    def has(self, objects: list[Any]) -> bool:
        """Return whether these are the same objects."""
        return len(objects) == len(self.objects) and all(map(is_, objects, self.objects))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PythonState) and self._values == other._values)

    def __hash__(self) -> int:
        return self._hash


class Watcher:
    """Looks at the Python state of a model and its objectives."""

    def __init__(self, model: nn.Module, objectives: Iterable[Any]) -> None:
        given = [getattr(item, "__self__", item) for item in objectives]  # The object of a method.
        owners = [item for item in given if isinstance(getattr(item, "__dict__", None), dict)]
        self._roots = [model, *owners, *(item for owner in owners for item in vars(owner).values())]
        self._owners = [owner for owner in owners if not isinstance(owner, nn.Module)]
        self._find_homes()
        self._last = PythonState([])

    def look(self, plan: Any) -> PythonState:
        """Return the state now, with a plan: the last one if nothing has changed."""
        objects = self._objects(plan)
        if not self._last.has(objects):
            self._find_homes()  # A module may have been replaced.
            self._last = PythonState(self._objects(plan))
        return self._last

    def _find_homes(self) -> None:
        roots = [root for root in self._roots if isinstance(root, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        attributes = [vars(owner) for owner in (*modules, *self._owners)]
        self._homes = attributes + [module._modules for module in modules if module._modules]
        self._hooks = [vars(module).get(name, ()) for module in modules for name in _HOOKS]

    def _objects(self, plan: Any) -> list[Any]:
        homes = map(dict.values, (*self._homes, vars(plan)))
        return [*chain.from_iterable(homes), *chain.from_iterable(self._hooks)]


def _value(item: Any) -> Any:
    return (type(item), item) if type(item) in _BY_VALUE else id(item)
