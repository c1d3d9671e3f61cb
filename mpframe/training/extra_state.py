"""The state of modules that their `state_dict` does not bring back, for a resumed run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from mpframe.core.buffers import entries, takes
from mpframe.core.errors import CheckpointError
from mpframe.core.tree import device_of


class ExtraState:
    """The changes that training makes in a new model and its `state_dict` does not bring back.

    These are non-persistent buffers, buffers whose shape changed (torch refuses those), and, in
    modules with buffers, numbers and flags in plain attributes, such as the pointer of a memory
    bank. Values that are as at the start are left out, as a new model has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device, self._places = device_of(model), _places(model)
        saved = model.state_dict()  # For its entries the shape is enough.
        self._start = {
            name: _copy_to(home[key], "meta" if name in saved else "cpu")
            for name, (home, key) in self._places.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the changed tensors, numbers, flags and None by name, not copied."""
        now = {n: (home, home.get(key)) for n, (home, key) in self._places.items()}
        return {n: v for n, (h, v) in now.items() if _fits(h, v) and _differs(self._start[n], v)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set a state, and all else as at the start. CheckpointError if it is another model's."""
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
                home[key] = now.copy_(value) if takes(now, value) else value


def _places(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return, by name, the dict that has each buffer or plain number, and its key there."""
    return {
        f"{prefix}.{key}".lstrip("."): (home, key)
        for prefix, module in model.named_modules()
        if module._buffers and not isinstance(module, ScriptModule)
        for home in (module._buffers, vars(module))
        for key, value in entries(home).items()
        if _fits(home, value)
    }


def _fits(home: Any, value: Any) -> bool:
    """Return whether a checkpoint may hold this. Nobody can load a jagged tensor."""
    if "_buffers" in home:  # The `vars` of a module.
        return type(value) in (bool, int, float, type(None))
    return value is None or (isinstance(value, Tensor) and not (value.is_nested or value.is_meta))


def _copy_to(value: Any, device: torch.device | str) -> Any:
    """Return a copy on a device, for a tensor on `meta` zeros."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value, device=device) if value.is_meta else value.to(device, copy=True)


def _differs(before: Any, now: Any) -> bool:
    """Return whether a buffer (if kept on `meta`, its shape) or number changed."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return type(before) is not type(now) or before != now
    if before.is_meta and now.layout is torch.strided:
        return before.shape != now.shape
    return not takes(now, before) or not torch.equal(now.cpu(), before.cpu())
