"""Optimizers that look at a whole weight, such as Muon, where a rank holds a part of each.

One weight at a time is gathered for its step, with its gradient and its state. All ranks take the
same step, and each keeps its part. So a step needs the memory of one weight more.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.comm import is_sharded, part_for, shard_like

KINDS = (torch.optim.Muon, torch.optim.Adafactor)
_ONE_LONG = {"row_var": -1, "col_var": -2}  # Adafactor's factors, each 1 long in this dimension


def _is_in_parts(name: str, value: Tensor, place: Tensor) -> bool:
    """Return whether a rank holds a part of a state: if the whole is shaped as its weight."""
    if name in _ONE_LONG:
        return place.shape[_ONE_LONG[name]] == 1
    return value.dim() > 0  # All others but the count of steps, which is 0-d.


def gather(place: Tensor, part: Tensor) -> Tensor:
    """Return the whole tensor of which this rank holds `part`, as it holds one of `place`."""
    tensor: Any = shard_like(place, part)
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


class WholeWeights(Optimizer):
    """The base of an optimizer of `KINDS` whose weights are gathered for its step."""

    places: Sequence[Sequence[Tensor]] = ()  # by group, the parameters whose parts are stepped

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each weight that has a gradient, of which this rank holds a part."""
        groups = self.param_groups
        try:
            for group, places in zip(groups, self.places, strict=True):
                for part, place in zip(group["params"], places, strict=True):
                    if part.grad is not None:
                        self._step_one(group, part, place)
        finally:
            self.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Return torch's, in which tensors that are not in parts are marked as `whole`."""
        state = super().state_dict()
        for number, place in enumerate(chain(*self.places)):
            kept = dict(state["state"].get(number, ()))
            for name, value in kept.items():
                if not _is_in_parts(name, value, place):
                    kept[name] = value.view_as(value)
                    kept[name].whole = True
            if kept:
                state["state"][number] = kept
        return state

    def _step_one(self, group: dict[str, Any], part: Tensor, place: Tensor) -> None:
        whole = gather(place, part)
        whole.grad = gather(place, part.grad)  # type: ignore[arg-type]
        state = self.state.pop(part, {})
        self.state[whole] = {
            name: gather(place, value) if _is_in_parts(name, value, place) else value
            for name, value in state.items()
        }
        self.param_groups = [{**group, "params": [whole]}]
        kind: Any = type(self).__mro__[2]
        kind.step.__wrapped__(self)  # without its hooks, which were called for all weights
        part.copy_(part_for(place, whole))
        self.state[part] = {
            name: part_for(place, value).clone() if _is_in_parts(name, value, place) else value
            for name, value in self.state.pop(whole).items()
        }


def gather_for_steps(optimizer: Optimizer) -> bool:
    """Make an optimizer of `KINDS` gather its weights, once it has `places`; return whether it is.

    Call it before a schedule is made, which replaces the optimizer's `step`.
    """
    kind = type(optimizer)
    if kind in KINDS:
        optimizer.__class__ = type(kind.__name__, (WholeWeights, kind), {})
        optimizer._patch_step_function()
    return isinstance(optimizer, WholeWeights)
