"""Buffers and plain attributes of modules: saved, restored, and copied for a while."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, Self

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

_OF_TORCH = frozenset(vars(nn.Module()))  # Parameters, buffers, submodules, hooks, the mode.
# Exactly these: a subclass may refuse to be changed, as the frozen dicts of configurations do.
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}


class State:
    """Buffers and plain attributes of modules as they are now.

    They belong together: an attribute may say how far a cache is filled. A list, dict, set or deque
    gets back its present items, but not what is changed inside of them.

    In a `with` block, which may be entered more than once, the modules have this state in copies
    that they may fill, replace or resize. Afterwards the state from before the block is back.

    Args:
        homes: the `_buffers` and the `vars` of modules.
    """

    def __init__(self, homes: Iterable[Any] = ()) -> None:
        self._kept = [(home, entries(home)) for home in homes]
        values = [value for _, kept in self._kept for value in kept.values()]
        self._items = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The state of all modules except lazy ones; a ScriptModule has no plain attributes."""
        modules = [m for m in model.modules() if not isinstance(m, LazyModuleMixin)]
        plain = [vars(m) for m in modules if not isinstance(m, ScriptModule)]
        return cls([m._buffers for m in modules] + plain)

    def __enter__(self) -> None:
        self._present = State(home for home, _ in self._kept)
        self.with_copies().restore()

    def __exit__(self, *_: object) -> None:
        self._present.restore()

    def with_copies(self) -> Self:
        """The same with copies of the tensors, one of each."""
        state, copies = copy.copy(self), dict[int, Tensor]()
        state._kept = [
            (home, {name: _clone(value, copies) for name, value in kept.items()})
            for home, kept in self._kept
        ]
        return state

    def find_replaced(self) -> list[tuple[Any, str, Any, Any]]:
        """Each place with another object now: home, name, that object, and the one before."""
        return [
            (home, name, now.get(name), kept.get(name))
            for home, kept in self._kept
            for now in [entries(home)]
            for name in kept | now
            if now.get(name) is not kept.get(name)
        ]

    def has_changed(self) -> bool:
        """Whether any place has another object, or a container has other items."""
        return bool(self.find_replaced()) or any(_ids(v) != _ids(was) for v, was in self._items)

    def restore(self) -> None:
        """Put everything back."""
        for home, kept in self._kept:
            for name in entries(home).keys() - kept.keys():
                del home[name]
            for name, value in kept.items():
                home[name] = value
        for container, items in self._items:
            container.clear()
            add = container.extend if isinstance(container, list | deque) else container.update
            add(items)


def entries(home: Any) -> dict[str, Any]:
    """What a module keeps there, except what torch keeps and tensors with a gradient."""
    return {
        name: value
        for name, value in home.items()
        if name not in _OF_TORCH and not (isinstance(value, Tensor) and value.requires_grad)
    }


def _clone(value: Any, copies: dict[int, Tensor]) -> Any:
    plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    if plain and id(value) not in copies:
        copies[id(value)] = value.clone()
    return copies.get(id(value), value)


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]
