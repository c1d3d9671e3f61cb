"""Runs a model to learn about it, and then restores all that a forward pass changes."""

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_OF_TORCH = frozenset(vars(nn.Module()))  # Parameters, buffers, submodules, hooks, the mode.
# Exactly these: a subclass may refuse to be changed, as the frozen dicts of configurations do.
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The block runs `model`; afterwards its parameters, its buffers, the plain attributes of its
    modules and the random generators are as before."""
    with State.of(model), _same_parameters(model), _same_random_numbers():
        yield


class State:
    """Buffers and plain attributes of modules as they are now.

    They belong together: an attribute may say how far a cache is filled. A list, dict, set or deque
    gets back the items that it has now; what lies deeper is not looked at.

    In a `with` block, which may be entered more than once, the modules have this state in copies
    that they may fill, replace or resize. Afterwards what was there before the block is back.

    Args:
        homes: the `_buffers` and the `vars` of modules.
    """

    def __init__(self, homes: Iterable[Any] = ()) -> None:
        self._kept = [(home, entries(home)) for home in homes]
        values = [value for _, kept in self._kept for value in kept.values()]
        self._items = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """That of all its modules, but for lazy ones; a ScriptModule has no plain attributes."""
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
        """Where another object stands now, under which name, that object, and what was there."""
        return [
            (home, name, now.get(name), kept.get(name))
            for home, kept in self._kept
            for now in [entries(home)]
            for name in kept | now
            if now.get(name) is not kept.get(name)
        ]

    def has_changed(self) -> bool:
        """Whether another object stands anywhere, or a container has other items."""
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
    """What a module holds there, without what torch itself keeps and tensors with a gradient."""
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
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
