"""Masters: the fp32 tensor behind each parameter of an optimizer.

A half parameter has a master, made from the fp32 value it had before it was rounded. An fp32
parameter is its own master, and one that appears under several names has one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.distributed.shards import is_sharded, part_for, part_of, sharded_as
from mpframe.errors import CheckpointError, ConfigError
from mpframe.optim.gradients import Gradients, measured
from mpframe.optim.masters.master import (
    Master,
    copy_to_params,
    forget,
    master_behind,
    master_for,
    remember,
    restore,
)
from mpframe.optim.masters.write_detector import adopt_writes
from mpframe.tree import HALF, map_tensors, to_fp32

_WRAPPED: WeakSet[Optimizer] = WeakSet()


class Masters:
    """A mapping from parameters to masters, in the order of the optimizer's groups.

    Args:
        starts: fp32 values from before the rounding, by half parameter. They may include
            parameters that no group has yet: a group that is added later starts from them.
        kind: of the masters that are made; None makes every parameter its own master.

    Attributes:
        half: the half parameters that have a master, each with it.
        device: of all parameters.
    """

    def __init__(self, starts: Mapping[Tensor, Tensor], kind: type[Master] | None) -> None:
        for parameter, start in starts.items():
            if parameter.dtype in HALF:
                remember(parameter, start.clone(), kind or Master)
        self._kind = kind
        self._masters: dict[Tensor, Tensor] = {}
        self._sharded = False  # Asked once for all parameters, not for each in every step.
        self.half: dict[Tensor, Master] = {}
        self.device = torch.device("cpu")

    def __getitem__(self, parameter: Tensor) -> Tensor:
        held = self.half.get(parameter) or master_behind(parameter)
        return self._masters[parameter] if held is None else held.current(parameter)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._masters

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._masters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for parameter, held in self.half.items():
            restore(parameter, held)

    def values(self) -> Collection[Tensor]:
        """The masters, in the order of the parameters."""
        return self._masters.values()

    @property
    def owners(self) -> dict[Tensor, Tensor]:
        """The parameter of each master."""
        return {master: parameter for parameter, master in self._masters.items()}

    def register(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Put masters in the place of a group's half parameters, state and all.

        Raises:
            ConfigError: a parameter is complex, sparse and half, or on another device than the
                others; nothing has been changed.
        """
        self._refuse(group["params"])
        for index, parameter in enumerate(group["params"]):
            self._masters[parameter] = part_of(parameter)
            if is_sharded(parameter):
                self._sharded = True
                group["params"][index] = self._masters[parameter]
            if parameter.dtype not in HALF:
                continue
            if self._kind is None:
                forget(parameter)
                continue
            held = self.half[parameter] = master_for(parameter, self._kind)
            adopt_writes([(parameter, held)])
            master = self._masters[parameter] = held.value
            group["params"][index] = master.requires_grad_(parameter.requires_grad)
            if parameter in optimizer.state:
                kept = optimizer.state.pop(parameter)
                optimizer.state[master] = {k: to_fp32(v) for k, v in kept.items()}

    def take_gradients(self, scale: Tensor | float) -> Gradients:
        """The gradients, measured; parameters and masters are left without.

        A gradient that a user's own backward pass left at a master counts as well, in fp32.

        Args:
            scale: what the loss was multiplied by, > 0.
        """
        taken = []
        for parameter, master in self._masters.items():
            gradient = parameter.grad
            if master is not parameter and master.grad is not None:
                gradient = _sum(gradient, master.grad)
            if gradient is not None:
                if self._sharded:
                    gradient = part_of(gradient)
                taken.append((master, gradient))
                parameter.grad = master.grad = None
        return measured(taken, scale, self.device)

    def saturated(self) -> Tensor:
        """How many half weights are held at the end of their range (0-d int64, on the device)."""
        counts = [_beyond(parameter, self[parameter]) for parameter in self.half]
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        return torch.stack(counts).sum() if counts else zero

    def saturation_warning(self, model: nn.Module) -> str | None:
        """A line for the log: how many, and the parameters with the most; None if there is none."""
        if not self.saturated():
            return None
        pairs = [(name, p) for name, p in model.named_parameters() if p in self._masters]
        counts = {name: int(_beyond(p, self._masters[p])) for name, p in pairs}
        worst = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])
        return (
            f"{sum(counts.values())} weights lie beyond the half range and are held at its end "
            f"({', '.join(worst[:3])}{', ...' if len(worst) > 3 else ''}); their masters go on: "
            "lower optimizer.lr, use dtype.half=bfloat16, or pin the module with "
            "ops.modules=...:fp32"
        )

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """The fp32 tensor behind each parameter of `model`, by its name, if there is one."""
        named = model.named_parameters(remove_duplicate=False)
        known = {name: self._behind(parameter) for name, parameter in named}
        return {name: master.detach() for name, master in known.items() if master is not None}

    def with_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state, as it keeps it by its groups, with sharded tensors where they are.

        What has the shape of a part is one.
        """
        return self._by_parameter(
            state,
            lambda own, value: (
                sharded_as(own, value) if value.shape == part_of(own).shape else value
            ),
        )

    def with_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """The reverse of `with_shards`, also for a state that is whole."""
        return self._by_parameter(
            state,
            lambda own, value: part_for(own, value) if value.shape == own.shape else value,
        )

    def listed(self) -> list[Tensor | None]:
        """The master of each half parameter, None if a parameter is its own."""
        return [self[parameter] if parameter in self.half else None for parameter in self]

    def check_listed(self, listed: list[Tensor | None]) -> None:
        """Raise CheckpointError if `listed` was made over other parameters."""
        shapes = [tuple(master.shape) for master in self._masters.values()]
        others = [None if master is None else tuple(master.shape) for master in listed]
        fits = len(shapes) == len(others)
        if not fits or any(b not in (None, a) for a, b in zip(shapes, others, strict=True)):
            raise CheckpointError(
                f"optimizer state holds {len(others)} masters, and not the shapes of the model's "
                f"{len(shapes)}: load it into the model it was made with"
            )

    def load_listed(self, listed: list[Tensor | None]) -> None:
        """Take what `listed` gave; if it has None the master stays as it is."""
        adopt_writes(self.half.items(), join=True)
        for own, loaded in zip(self._masters.values(), listed, strict=True):
            if loaded is not None:
                own.copy_(loaded)
        copy_to_params(self.half.items())

    def stepped(self, parameter: Tensor) -> Tensor:
        """The tensor in the optimizer's groups, by which it keeps its state."""
        return self._masters[parameter]

    def _by_parameter(
        self, state: dict[str, Any], change: Callable[[Tensor, Tensor], Tensor]
    ) -> dict[str, Any]:
        """The state with each tensor changed that belongs to a sharded parameter."""
        kept = dict(state["state"])
        for index, own in enumerate(self._masters):
            if is_sharded(own) and index in kept:
                kept[index] = map_tensors(partial(change, own), kept[index])
        return {**state, "state": kept}

    def _behind(self, parameter: Tensor) -> Tensor | None:
        """The master of a parameter in a group, or of one that no group has yet."""
        if is_sharded(parameter):
            return parameter
        if parameter in self._masters:
            return self[parameter]
        held = master_behind(parameter)
        return None if held is None else held.current(parameter)

    def _refuse(self, parameters: list[Tensor]) -> None:
        for index, parameter in enumerate(parameters):
            if not self._masters and index == 0:
                self.device = parameter.device
            if parameter.is_complex():
                raise ConfigError(
                    f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is "
                    f"{parameter.dtype}; masters hold real numbers: store it as two real parameters"
                )
            if (
                self._kind is not None
                and parameter.dtype in HALF
                and parameter.layout != torch.strided
            ):
                raise ConfigError(
                    f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is sparse and "
                    f"{parameter.dtype}; a half weight is dense: store it in fp32 "
                    "(ops.modules=...:fp32), or dense"
                )
            if parameter.device != self.device:
                raise ConfigError(
                    f"optimizer: parameters on {self.device} and {parameter.device}; one verdict "
                    "covers a step, so give each device an optimizer of its own"
                )


def load_by_name(model: nn.Module, parts: Sequence[Masters], weights: Mapping[str, Tensor]) -> None:
    """Take parameters and buffers by name: masters exactly, half weights as their rounding.

    Args:
        model: what the weights are of.
        parts: the masters of all its optimizers.
        weights: fp32 values by name.

    Raises:
        CheckpointError: a name is missing or unexpected, or a shape differs; nothing is taken.
    """
    own = dict(model.state_dict())
    for masters in parts:
        own |= masters.by_name(model)
    _refuse_other_weights(own, weights)
    known, held = {p: m for masters in parts for p, m in masters.half.items()}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        master = known.get(parameter) or master_behind(parameter)
        if master is not None:
            master.start_from(parameter, weights[name])
            held[parameter] = master
            own.pop(name, None)
    for name, tensor in own.items():
        _copy_held(tensor, weights[name])
    copy_to_params(held.items())


def refuse_wrapped(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose parameters are masters already, and remember this one.

    Raises:
        ConfigError: the optimizer was given here before.
    """
    if optimizer in _WRAPPED:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: has its masters already; use what the first "
            "call returned, or make a new optimizer"
        )
    note_wrapped(optimizer)


def note_wrapped(optimizer: Optimizer) -> None:
    """Remember that an optimizer's parameters are masters."""
    _WRAPPED.add(optimizer)


def _sum(gradient: Tensor | None, of_master: Tensor) -> Tensor:
    """A half gradient and one of its master, in fp32; one alone is itself."""
    if gradient is None:
        return of_master
    wide = gradient.float()
    # torch adds a sparse gradient to a dense one, and not the other way round.
    return wide + of_master if of_master.is_sparse else of_master + wide


def _beyond(parameter: Tensor, master: Tensor) -> Tensor:
    return (master.abs() > torch.finfo(parameter.dtype).max).sum()


def _copy_held(target: Tensor, source: Tensor) -> None:
    """Copy into a tensor that may be half (a buffer, if there are no op lists), saturated."""
    if target.dtype in HALF:
        limit = torch.finfo(target.dtype).max
        source = source.clamp(-limit, limit)
    part_of(target).copy_(part_for(target, source))


def _refuse_other_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() ^ weights.keys()):
        what = "is missing from" if name in own else "is unknown to the model but in"
        raise CheckpointError(f"weights: {name!r} {what} the checkpoint; load the model it is of")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"weights: {name!r} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model; load the model it is of"
            )
