"""A model's buffers, restored after a skipped step, and what of them a resumed run needs.

BatchNorm moves its running statistics in the forward pass, long before the gradients say whether
the step counts. So the buffers are copied before the step and put back where it is skipped: one
overflow in a forward pass would otherwise leave nan in the statistics for good.

Other modules fill a cache and note in a plain attribute how far. Both are undone, or neither is: a
module that takes an emptied cache for full reads zeros.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from mpframe.distributed.world import World
from mpframe.errors import CheckpointError
from mpframe.optim.verdict import read
from mpframe.precision.module_state import State, entries
from mpframe.tree import device_of


class Buffers:
    """The buffers of a model and a copy of what they were.

    Args:
        model: on its device; modules that have buffers now may replace or resize them.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if module._buffers]
        self._homes: list[Any] = [module._buffers for module in modules]
        # torch's own modules note nothing there about their buffers.
        self._attributes_of = [vars(module) for module in modules if not _is_of_torch(module)]
        self._kept, self._attributes = State(), State()

    def save(self) -> None:
        """Copy the buffers as they are now, and the plain attributes of their modules."""
        self._kept = State(self._homes).with_copies()
        self._attributes = State(self._attributes_of)

    def broadcast(self, world: World) -> None:
        """Give all ranks the buffers of rank 0, whose samples alone moved them."""
        world.broadcast_(self._present())

    def start_broadcast(self, world: World) -> Callable[[], None]:
        """Begin what `broadcast` does; the call of what is returned ends it."""
        return world.start_broadcast_(self._present())

    def _present(self) -> list[Tensor]:
        return [buffer for home in self._homes for buffer in home.values() if buffer is not None]

    @torch.no_grad()
    def restore_where(self, skipped: Tensor | bool) -> None:
        """Put the copies back if `skipped`: a bool, or 0-d on the device.

        The device chooses values without the host. If a plain attribute changed or a buffer its
        shape, and for sparse and expanded buffers, the host has to know, and waits for the device.
        """
        if skipped is False:
            return
        moved = self._kept.find_replaced()  # The copies are never the buffers.
        only_values = all(_takes(buffer, kept) for _, _, buffer, kept in moved)
        if isinstance(skipped, Tensor) and not (only_values and not self._attributes.has_changed()):
            skipped = read([(skipped, None)])[0].skipped
        for home, name, buffer, kept in moved:
            if isinstance(skipped, Tensor):
                buffer.copy_(torch.where(skipped, kept, buffer))
            elif skipped:
                home[name] = buffer.copy_(kept) if _takes(buffer, kept) else kept
        if skipped is True:
            self._attributes.restore()


class ExtraState:
    """What training changes in modules and their `state_dict` does not bring back.

    These are buffers that are not persistent; buffers of another shape than at the start, which
    torch refuses; and, in modules with buffers, numbers and flags in plain attributes, such as the
    pointer of a memory bank. What is as it was at the start is left out: a new model has it.

    Args:
        model: new, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device, self._places = device_of(model), _places(model)
        saved = model.state_dict()  # Of what it holds, the shape is enough.
        self._start = {
            name: _copy_to(home[key], "meta" if name in saved else "cpu")
            for name, (home, key) in self._places.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, flags and None by name; not copied."""
        now = {n: (home, home.get(key)) for n, (home, key) in self._places.items()}
        return {n: v for n, (h, v) in now.items() if _fits(h, v) and _differs(self._start[n], v)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave; what it lacks becomes as it was at the start.

        Raises:
            CheckpointError: an entry is no buffer or number of this model; nothing is taken.
        """
        for name, value in state.items():
            if name not in self._places or not _fits(self._places[name][0], value):
                raise CheckpointError(
                    f"extra_state: {name!r} in the checkpoint is no buffer or number of the model; "
                    "load the model it is of"
                )
        for name, (home, key) in self._places.items():
            value, now = {**self._start, **state}[name], home.get(key)
            if _differs(value, now):
                value = _copy_to(value, self._device)
                home[key] = now.copy_(value) if _takes(now, value) else value


def _places(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """By name where each buffer stands, and each number of a module with buffers; and its key."""
    return {
        f"{prefix}.{key}".lstrip("."): (home, key)
        for prefix, module in model.named_modules()
        if module._buffers and not isinstance(module, ScriptModule)
        for home in (module._buffers, vars(module))
        for key, value in entries(home).items()
        if _fits(home, value)
    }


def _fits(home: Any, value: Any) -> bool:
    """Whether a checkpoint may hold this. Nobody can load a jagged tensor."""
    if "_buffers" in home:  # The `vars` of a module.
        return type(value) in (bool, int, float, type(None))
    return value is None or (isinstance(value, Tensor) and not (value.is_nested or value.is_meta))


def _copy_to(value: Any, device: torch.device | str) -> Any:
    """A copy of a tensor on a device; one on `meta` becomes zeros."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value, device=device) if value.is_meta else value.to(device, copy=True)


def _is_of_torch(module: nn.Module) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    return packages <= {"torch", "builtins"}


def _takes(buffer: Any, values: Any) -> bool:
    """Whether values can be copied into a buffer: both are dense and alike."""
    if not isinstance(buffer, Tensor) or not isinstance(values, Tensor) or buffer.is_nested:
        return False
    if not buffer.layout is values.layout is torch.strided or 0 in buffer.stride():
        return False
    return buffer.shape == values.shape and buffer.dtype == values.dtype


def _differs(before: Any, now: Any) -> bool:
    """Whether a buffer or number changed; of a buffer that is kept on `meta`, its shape."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return type(before) is not type(now) or before != now
    if before.is_meta and now.layout is torch.strided:
        return before.shape != now.shape
    return not _takes(now, before) or not torch.equal(now.cpu(), before.cpu())
