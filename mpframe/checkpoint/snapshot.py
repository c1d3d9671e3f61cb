"""What a checkpoint contains, and a copy of it that the run can no longer change."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps.

    Attributes:
        global_step: names the checkpoint.
        state: tensors, numbers, strings, and lists, tuples and dicts of them.
        config: the resolved options as YAML.
        facts: what can be read without the state, as JSON: `validation`, `made_on`, `run`.
    """

    global_step: int
    state: dict[str, Any]
    config: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def detached(self) -> Self:
        """A copy with every tensor on the CPU, which does not change if training continues."""
        return replace(self, state=_copied(self.state, {}))


def _copied(value: Any, copies: dict[Any, Tensor]) -> Any:
    """A deep copy; tensors that share memory share it in the copy, too."""
    if isinstance(value, Tensor):
        address = value.data_ptr() if value.layout is torch.strided else 0  # Sparse ones have none.
        place = address and (address, value.dtype, value.device, value.shape, value.stride())
        if address == 0 or place not in copies:
            copies[place] = value.detach().to("cpu", copy=True)
        return copies[place]
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        return {key: _copied(entry, copies) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, copies) for entry in value)
    return copy.deepcopy(value)
