"""A model's buffers, restored after a skipped step.

BatchNorm moves its running statistics in the forward pass, before the gradients say whether the
step counts. One overflow would leave nan in the statistics for good. So the buffers are copied
before the step and put back if it is skipped.

Other modules fill a cache and note in a plain attribute how full it is. Both are restored, or
neither: a module that takes an emptied cache for a full one reads zeros.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

from mpframe.core.step_result import StepResult, read_verdicts
from mpframe.core.tree import not_finite

_OF_TORCH = frozenset(vars(nn.Module()))  # Parameters, buffers, submodules, hooks, the mode.
# Exactly these: a subclass may refuse to be changed, as the frozen dicts of configurations do.
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_MISSING = object()  # in place of an entry that is not there


class ModuleState:
    """Buffers and plain attributes of modules as they are now.

    A list, dict, set or deque gets back its present items, not changes inside of them. In a `with`
    block, which may be entered more than once, the modules have this state in copies that they may
    fill, replace or resize. Afterwards the state from before the block is back.

    Args:
        homes: the dicts to save, each the `_buffers` or the `vars` of a module.
    """

    def __init__(self, homes: Iterable[Any] = ()) -> None:
        self._kept = [(home, entries(home)) for home in homes]
        values = [value for _, kept in self._kept for value in kept.values()]
        self._items = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the state of all modules except lazy ones. A ScriptModule has no attributes."""
        modules = [m for m in model.modules() if not isinstance(m, LazyModuleMixin)]
        plain = [vars(m) for m in modules if not isinstance(m, ScriptModule)]
        return cls([m._buffers for m in modules] + plain)

    def __enter__(self) -> None:
        self._present = ModuleState(home for home, _ in self._kept)
        self.with_copies().restore()

    def __exit__(self, *_: object) -> None:
        self._present.restore()

    def with_copies(self) -> Self:
        """Return the same state with copies of the tensors, one of each."""
        state, copies = copy.copy(self), dict[int, Tensor]()
        state._kept = [
            (home, {name: _clone(value, copies) for name, value in kept.items()})
            for home, kept in self._kept
        ]
        return state

    def find_replaced(self) -> list[tuple[Any, str, Any, Any]]:
        """Return each place with another object now: home, name, that object, the one before."""
        return [
            (home, name, now.get(name, _MISSING), kept.get(name, _MISSING))
            for home, kept in self._kept
            for now in [entries(home)]
            for name in kept | now
            if now.get(name, _MISSING) is not kept.get(name, _MISSING)
        ]

    def has_changed(self) -> bool:
        """Return whether any place has another object, or a container has other items."""
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
    """Return a home's entries, except torch's and tensors that require gradients."""
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


class Buffers:
    """The buffers of a model, which may be replaced or resized, and a copy of them."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if module._buffers]
        self._homes: list[Any] = [module._buffers for module in modules]
        # torch's own modules note nothing there about their buffers.
        self._attributes_of = [vars(module) for module in modules if not _is_of_torch(module)]
        self._kept, self._attributes = ModuleState(), ModuleState()

    def save(self) -> None:
        """Copy the buffers as they are now, and the plain attributes of their modules."""
        if self._homes:  # In a tiny model without buffers the calls would cost.
            self._kept = ModuleState(self._homes).with_copies()
            self._attributes = ModuleState(self._attributes_of)

    def tensors(self) -> list[Tensor]:
        """Return the buffers themselves."""
        return [buffer for home in self._homes for buffer in home.values() if buffer is not None]

    def restore_unless_good(self, amax: Tensor, losses: Iterable[Any]) -> None:
        """Put the copies back if the gradients' amax, 0-d, is inf or nan, or no sample counts."""
        if self._homes:
            self.restore_where(not_finite(amax) | (sum(loss.samples for loss in losses) == 0))

    def restore_if_skipped(self, result: StepResult) -> None:
        """Put the copies back if any part of the step was skipped."""
        if self._homes:
            self.restore_where(result.any_skipped())

    @torch.no_grad()
    def restore_where(self, skipped: Tensor | bool) -> None:
        """Put the copies back if `skipped`: a bool, or 0-d, 0 or 1, on the device.

        The device chooses values without the host, which must wait for the device only if a plain
        attribute or a buffer's shape changed, and for sparse and expanded buffers.
        """
        if skipped is False:
            return
        moved = self._kept.find_replaced()  # All buffers: a copy is another object.
        only_values = all(takes(buffer, kept) for _, _, buffer, kept in moved)
        if isinstance(skipped, Tensor) and not (only_values and not self._attributes.has_changed()):
            skipped = read_verdicts([(skipped, None)])[0].skipped
        skipped = skipped.bool() if isinstance(skipped, Tensor) else skipped
        for home, name, buffer, kept in moved:
            if isinstance(skipped, Tensor):
                buffer.copy_(torch.where(skipped.to(buffer.device), kept, buffer))
            elif skipped and kept is _MISSING:
                del home[name]  # The forward pass has registered it.
            elif skipped:
                home[name] = buffer.copy_(kept) if takes(buffer, kept) else kept
        if skipped is True:
            self._attributes.restore()


NO_BUFFERS = Buffers(nn.Module())


def _is_of_torch(module: nn.Module) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    return packages <= {"torch", "builtins"}


def takes(buffer: Any, values: Any) -> bool:
    """Return whether values can be copied into a buffer: both are dense and alike."""
    if not isinstance(buffer, Tensor) or not isinstance(values, Tensor) or buffer.is_nested:
        return False
    if not buffer.layout is values.layout is torch.strided or 0 in buffer.stride():
        return False
    return buffer.shape == values.shape and buffer.dtype == values.dtype
