"""Masters: the fp32 tensor behind each parameter of an optimizer.

A half parameter has a master of its own, made from the fp32 value it had before it was rounded. An
fp32 parameter is its own master, and one that appears under several names has one.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.errors import CheckpointError, ConfigError
from mpframe.precision.tree import HALF, widened

_WRAPPED: WeakSet[Optimizer] = WeakSet()


class Masters:
    """A mapping from parameters to masters, in the order of the optimizer's groups.

    Args:
        unclaimed: fp32 values from before the rounding, by parameter; each is taken out when its
            parameter is adopted.
        keep: False makes every parameter its own master.
    """

    def __init__(self, unclaimed: MutableMapping[Tensor, Tensor], keep: bool) -> None:
        self._unclaimed = unclaimed
        self._keep = keep
        self._masters: dict[Tensor, Tensor] = {}
        self.half_pairs: list[tuple[Tensor, Tensor]] = []
        self.device = torch.device("cpu")

    def __getitem__(self, parameter: Tensor) -> Tensor:
        return self._masters[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._masters

    def __iter__(self) -> Any:
        return iter(self._masters)

    def items(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(parameter, master) of every parameter."""
        return self._masters.items()

    def adopt(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Put masters in the place of a group's half parameters, state and all.

        Raises:
            ConfigError: a parameter is complex, or on another device than the others; nothing has
                been changed.
        """
        self._refuse(group["params"])
        for index, parameter in enumerate(group["params"]):
            start = self._unclaimed.pop(parameter, parameter)
            master = parameter
            if parameter.dtype in HALF and self._keep:
                master = start.detach().to(torch.float32, copy=True)
                master.requires_grad_(parameter.requires_grad)
                group["params"][index] = master
                if parameter in optimizer.state:
                    kept = optimizer.state.pop(parameter)
                    optimizer.state[master] = {k: widened(v) for k, v in kept.items()}
            self._masters[parameter] = master
        self.half_pairs = [(p, m) for p, m in self._masters.items() if p is not m]

    def publish(self) -> None:
        """Round the masters into the half weights; beyond the format's range, to its end."""
        _round_into(self.half_pairs)

    def publish_unclaimed(self) -> None:
        """The same for half weights that no optimizer has taken yet."""
        _round_into(self._unclaimed.items())

    def saturated(self) -> Tensor:
        """How many half weights are held at the end of their range (0-d int64, on the device)."""
        counts = [_beyond(parameter, master) for parameter, master in self.half_pairs]
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        return torch.stack(counts).sum() if counts else zero

    def saturation_warning(self, model: nn.Module) -> str | None:
        """What a log says of them: how many, and the parameters with the most; None without any."""
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
        """The fp32 tensor behind each parameter of `model`, by its name, where there is one."""
        known = {**self._unclaimed, **self._masters}
        named = model.named_parameters(remove_duplicate=False)
        return {name: known[p].detach() for name, p in named if p in known}

    def listed(self) -> list[Tensor | None]:
        """The master of each half parameter, None where a parameter is its own."""
        return [None if master is parameter else master for parameter, master in self.items()]

    def check_listed(self, listed: list[Tensor | None]) -> None:
        """Raise CheckpointError where `listed` was made over other parameters."""
        shapes = [tuple(master.shape) for master in self._masters.values()]
        others = [None if master is None else tuple(master.shape) for master in listed]
        fits = len(shapes) == len(others)
        if not fits or any(b not in (None, a) for a, b in zip(shapes, others, strict=True)):
            raise CheckpointError(
                f"optimizer state holds {len(others)} masters, and not the shapes of the model's "
                f"{len(shapes)}: load it into the model it was made with"
            )

    def load_listed(self, listed: list[Tensor | None]) -> None:
        """Take what `listed` gave; where it has None the master stays as it is."""
        for own, loaded in zip(self._masters.values(), listed, strict=True):
            if loaded is not None:
                own.copy_(loaded)
        if any(loaded is not None for loaded in listed):
            self.publish()

    def _refuse(self, parameters: list[Tensor]) -> None:
        for index, parameter in enumerate(parameters):
            if not self._masters and index == 0:
                self.device = parameter.device
            if parameter.is_complex():
                raise ConfigError(
                    f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is "
                    f"{parameter.dtype}; masters hold real numbers: store it as two real parameters"
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
    for name, tensor in own.items():
        _copy_held(tensor, weights[name])
    for masters in parts:
        masters.publish()
        masters.publish_unclaimed()


def refuse_wrapped(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose parameters are masters already, and note it for the next time.

    Raises:
        ConfigError: the optimizer was given here before.
    """
    if optimizer in _WRAPPED:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: has its masters already; use what the first "
            "call returned, or make a new optimizer"
        )
    _WRAPPED.add(optimizer)


def _beyond(parameter: Tensor, master: Tensor) -> Tensor:
    return (master.abs() > torch.finfo(parameter.dtype).max).sum()


def _copy_held(target: Tensor, source: Tensor) -> None:
    """Copy into a tensor that may be half (a buffer where there are no op lists), saturated."""
    if target.dtype in HALF:
        limit = torch.finfo(target.dtype).max
        source = source.clamp(-limit, limit)
    target.copy_(source)


def _round_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, rounded and saturated."""
    by_format: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for weight, master in pairs:
        by_format.setdefault(weight.dtype, []).append((weight.detach(), master.detach()))
    for half, same in by_format.items():
        weights, masters = [w for w, _ in same], [m for _, m in same]
        limit = torch.finfo(half).max
        torch._foreach_copy_(weights, masters)
        # The copy rounds what lies beyond the range to inf; it belongs at the range's end.
        torch._foreach_clamp_max_(weights, limit)
        torch._foreach_clamp_min_(weights, -limit)


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
