"""The fp32 tensor behind each parameter of an optimizer: its master, or itself if it is fp32."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.distributed.shards import is_sharded, part_for, part_of, sharded_as
from mpframe.errors import CheckpointError, ConfigError
from mpframe.optim.gradients import Gradients, measure_grads
from mpframe.optim.masters.master import (
    Master,
    clear_master,
    copy_to_params,
    known_master,
    master_behind,
    master_for,
    rebind_master,
    remember,
)
from mpframe.optim.masters.write_detector import sync_from_weights
from mpframe.tree import HALF, map_tensors, to_fp32


class Masters(dict[Tensor, Tensor]):
    """Each parameter with the tensor in the optimizer's groups that stands for it, in their order.

    Args:
        starts: fp32 values from before the rounding, by half parameter. They may include
            parameters that no group has yet: a group that is added later starts from them.
        kind: of the masters that are made; None makes every parameter its own master.

    Attributes:
        half: the half parameters that have a master, each with it.
        device: of all parameters.
    """

    def __init__(self, starts: Mapping[Tensor, Tensor], kind: type[Master] | None) -> None:
        super().__init__()
        for parameter, start in starts.items():
            if parameter.dtype in HALF:
                remember(parameter, start.clone(), kind or Master)
        self._kind = kind
        self._sharded = False  # Asked once for all parameters, not for each in every step.
        self.half: dict[Tensor, Master] = {}
        self.device = torch.device("cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for parameter, master in self.half.items():
            rebind_master(parameter, master)

    def fp32(self, parameter: Tensor) -> Tensor:
        """Return the fp32 tensor behind a parameter; `parameter` if it is fp32 itself."""
        master = self.half.get(parameter) or master_behind(parameter)
        return self[parameter] if master is None else master.current(parameter)

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the fp32 tensor behind each parameter of `model`, by its name, if it has one."""
        masters: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if is_sharded(parameter):
                masters[name] = parameter.detach()
            elif parameter in self or master_behind(parameter) is not None:
                masters[name] = self.fp32(parameter).detach()
        return masters

    def register(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Put masters in the place of a group's half parameters, state and all."""
        self._check(group["params"])
        for index, parameter in enumerate(group["params"]):
            self[parameter] = part_of(parameter)
            if is_sharded(parameter):
                self._sharded = True
                group["params"][index] = self[parameter]
            if parameter.dtype not in HALF:
                continue
            if self._kind is None:
                clear_master(parameter)
                continue
            held = self.half[parameter] = master_for(parameter, self._kind)
            sync_from_weights([(parameter, held)])
            master = self[parameter] = held.value
            group["params"][index] = master.requires_grad_(parameter.requires_grad)
            if parameter in optimizer.state:
                kept = optimizer.state.pop(parameter)
                optimizer.state[master] = {k: to_fp32(v) for k, v in kept.items()}

    def collect_grads(self, scale: Tensor | float) -> Gradients:
        """Return the gradients, measured; parameters and masters are left without.

        A gradient that a user's backward pass left at a master is added in fp32.
        """
        collected = {}
        for parameter, master in self.items():
            gradient = parameter.grad
            if master is not parameter and master.grad is not None:
                gradient = _sum(gradient, master.grad)
            if gradient is not None:
                if self._sharded:
                    gradient = part_of(gradient)
                collected[master] = gradient
                parameter.grad = master.grad = None
        return measure_grads(collected, scale, self.device)

    def map_state(
        self, change: Callable[[Tensor, Tensor], Tensor], state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's `state_dict` with the tensors of sharded parameters changed."""
        kept = dict(state["state"])
        for index, parameter in enumerate(self):
            if is_sharded(parameter) and index in kept:
                kept[index] = map_tensors(partial(change, parameter), kept[index])
        return {**state, "state": kept}

    def listed(self) -> list[Tensor | None]:
        """Return the master of each half parameter, None for a parameter that is its own."""
        return [self.fp32(p) if p in self.half else None for p in self]

    def check_listed(self, listed: list[Tensor | None]) -> None:
        """Raise CheckpointError if `listed` was made over other parameters."""
        fits = len(listed) == len(self) and all(
            saved is None or saved.shape == master.shape
            for saved, master in zip(listed, self.values(), strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"optimizer state holds {len(listed)} masters, and not the shapes of the model's "
                f"{len(self)}: load it into the model it was made with"
            )

    def load_listed(self, listed: list[Tensor | None]) -> None:
        """Take what `listed` gave; a master for which it has None stays as it is."""
        loaded = [(p, saved) for p, saved in zip(self, listed, strict=True) if saved is not None]
        for parameter, saved in loaded:
            if parameter in self.half:
                self.half[parameter].start_from(parameter, saved)
            else:
                self[parameter].copy_(saved)
        copy_to_params((p, self.half[p]) for p, _ in loaded if p in self.half)

    def _check(self, parameters: list[Tensor]) -> None:
        for index, parameter in enumerate(parameters):
            if not self and index == 0:
                self.device = parameter.device
            what = f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is"
            if parameter.is_complex():
                raise ConfigError(
                    f"{what} {parameter.dtype}; masters hold real numbers: store it as two real "
                    "parameters"
                )
            half = self._kind is not None and parameter.dtype in HALF
            if half and parameter.layout != torch.strided:
                raise ConfigError(
                    f"{what} sparse and {parameter.dtype}; a half weight is dense: store it in "
                    "fp32 (ops.modules=...:fp32), or dense"
                )
            if parameter.device != self.device:
                raise ConfigError(
                    f"optimizer: parameters on {self.device} and {parameter.device}; one verdict "
                    "covers a step, so give each device an optimizer of its own"
                )


def to_sharded(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a part's state as a sharded tensor; a value of another shape as it is."""
    return sharded_as(parameter, value) if value.shape == part_of(parameter).shape else value


def to_part(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the part of a state that is sharded or whole; a value of another shape as it is."""
    return part_for(parameter, value) if value.shape == parameter.shape else value


def load_weights(
    model: nn.Module, masters: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Load a model's parameters and buffers by name; see `MasterWeights.load_masters`."""
    present = {**model.state_dict(), **masters}
    _check_names_and_shapes(present, weights)
    loaded = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        master = known_master(parameter)
        if master is not None:
            master.start_from(parameter, weights[name])
            loaded[parameter] = master
            present.pop(name, None)
    for name, tensor in present.items():
        _copy_clamped(tensor, weights[name])
    copy_to_params(loaded.items())


def _sum(gradient: Tensor | None, of_master: Tensor) -> Tensor:
    """Add a half gradient to its master's in fp32; if there is only the master's, return it."""
    if gradient is None:
        return of_master
    wide = gradient.float()
    # torch adds a sparse gradient to a dense one, and not the other way round.
    return wide + of_master if of_master.is_sparse else of_master + wide


def _copy_clamped(target: Tensor, source: Tensor) -> None:
    """Copy into a tensor that may be half (a buffer, if there are no op lists), in its range."""
    if target.dtype in HALF:
        limit = torch.finfo(target.dtype).max
        source = source.clamp(-limit, limit)
    part_of(target).copy_(part_for(target, source))


def _check_names_and_shapes(present: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name in sorted(present.keys() ^ weights.keys()):
        what = "is missing from" if name in present else "is unknown to the model but in"
        raise CheckpointError(f"weights: {name!r} {what} the checkpoint; load the model it is of")
    for name, tensor in present.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"weights: {name!r} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model; load the model it is of"
            )
