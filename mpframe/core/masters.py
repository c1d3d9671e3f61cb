"""The fp32 value behind each half weight: its master.

Other code may write the weight behind the optimizer's back (load_state_dict, init, copy_, clamp_,
.data). The master notices this by the weight's version, or by a sum of its bits where no version
tells, and takes the written value over before the next step. A weight has one master, whichever
optimizers hold it.

`Masters` are the parameters of one optimizer, each with the tensor that it steps: the master, or
the parameter itself if it is fp32.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.core.comm import is_sharded, part_for, part_of, sharded_as
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.tree import HALF, map_tensors, to_fp32

_SUMMED = 2**14  # words; a copy of fewer costs no more than their sums
_CHECKED = 2**14  # values; clamping fewer is cheaper than checking them

Pair = tuple[Tensor, "Master"]  # a half weight and its master
_MASTERS: MutableMapping[Tensor, "Master"] = WeakTensorKeyDictionary()


class _Seen:
    """A half weight as its master last wrote it; at first none.

    `words` is a view of its bits; it keeps the memory, so that no other tensor gets this address.
    `bits` is a copy of them, or the sums of their rows if `summed`; None: values are not compared.
    """

    address, version = -1, -1
    words: Tensor
    bits: Tensor | None = None
    summed = False

    @classmethod
    def at(cls, weight: Tensor) -> "_Seen":
        seen, words = cls(), weight.detach()
        rows = words.flatten(1) if weight.dim() > 1 else words.flatten()
        if weight.is_contiguous() and not (rows.shape[-1] % 4 or rows.storage_offset() % 4):
            words = rows.view(torch.int64)  # Over words of 16 bits sums take 60 times as long.
        seen.address, seen.words = weight.data_ptr(), words
        if _values_count(weight):
            large = words.dtype == torch.int64 and words.dim() > 1 and words.numel() >= _SUMMED
            seen.summed, seen.bits = large, torch.empty_like(words)
        return seen


def _values_count(weight: Tensor) -> bool:
    return weight.is_cpu


def _sums(words: Tensor) -> Tensor:
    return words.sum(-1)


def sync_from_weights(pairs: Iterable[Pair], *, look: bool = False) -> list[Tensor | bool]:
    """Let masters take over what others wrote into their weights; return which values changed.

    With `look` also where nothing tells of a write.
    """
    changed = []
    for weight, master in pairs:
        seen = master.seen
        same = seen.address == weight.data_ptr() and seen.version == weight._version
        if same and seen.bits is not None:
            same = torch.equal(_sums(seen.words) if seen.summed else seen.words, seen.bits)
        if not same or (look and seen.bits is None):
            changed.append(master.sync_from_weight(weight, not same))
            mark_known([(weight, master)])
    return changed


def mark_known(pairs: Iterable[Pair]) -> None:
    """Note that each weight is now as its master wrote it."""
    for weight, master in pairs:
        seen = master.seen
        if seen.address != weight.data_ptr():
            seen = master.seen = _Seen.at(weight)
        seen.version = weight._version
        if seen.summed:
            seen.bits = _sums(seen.words)
        elif seen.bits is not None:
            seen.bits.copy_(seen.words)


class Master:
    """The fp32 value behind a half weight. A subclass that keeps it otherwise overrides all.

    Args:
        weight: float16 or bfloat16.
        start: the value to begin with, of the weight's shape and any format; in fp32 it is `value`,
            not copied.

    Attributes:
        value: fp32, on the weight's device, in the optimizer's groups; always the same tensor.
        half: the weight's format when it was last written from here.
        seen: the weight as it was then.
    """

    seen = _Seen()

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.value = start.detach().to(weight.device, torch.float32)
        self.half = weight.dtype
        mark_known([(weight, self)])

    def __getstate__(self) -> dict[str, Any]:
        # Without what was seen, because the copy of a weight has another address.
        return {name: value for name, value in vars(self).items() if name != "seen"}

    @classmethod
    def check_format(cls, half: torch.dtype) -> None:
        """Raise ConfigError if weights of this format cannot have such masters."""

    def current(self, weight: Tensor) -> Tensor:
        """Return the fp32 value, with what others wrote into the weight."""
        sync_from_weights([(weight, self)])
        return self.value

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        """Take another value, and round it into the weight."""
        self.value.detach().copy_(start)
        self.round_to_weights([(weight, self)])

    @torch.no_grad()
    def sync_from_weight(self, weight: Tensor, noticed: bool) -> Tensor | bool:
        """Take over the weight's values; return whether others than the master's were written."""
        half = weight.dtype if weight.dtype in HALF else self.half
        now, rounded = weight.detach(), torch.empty_like(self.value, dtype=half)
        round_into([(rounded, self.value)])
        same = now == rounded
        self.value.copy_(torch.where(same, self.value, now.float()))
        self.half = weight.dtype
        return ~same.all()

    # Both take pairs of a weight and a master of this class, so that an update takes few calls.

    materialize = staticmethod(sync_from_weights)  # Makes `value` current, for an update.

    @staticmethod
    def round_to_weights(pairs: Collection[Pair]) -> None:
        """Round each `value` into its weight after an update."""
        rounded = []
        for weight, master in pairs:
            master.half = weight.dtype
            rounded.append((weight, master.value))
        round_into(rounded)
        mark_known(pairs)


@torch.no_grad()
def round_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, rounded to its format and saturated."""
    by_format: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for weight, master in pairs:
        weights, masters = by_format.setdefault(weight.dtype, ([], []))
        weights.append(weight)
        masters.append(master)
    for half, (weights, masters) in by_format.items():
        torch._foreach_copy_(weights, masters)
        # The copy rounds values beyond the range to inf; they belong at the range's end. On a CPU
        # a look at a large weight takes a third of the time of clamping it.
        held = []
        for weight in weights:
            if weight.is_cpu and weight.numel() >= _CHECKED:
                ends = torch.aminmax(weight)
                if ends.min.isfinite() & ends.max.isfinite():
                    continue
            held.append(weight)
        if held:
            torch._foreach_clamp_max_(held, torch.finfo(half).max)
            torch._foreach_clamp_min_(held, -torch.finfo(half).max)


def master_class(masters: bool | type[Master]) -> type[Master] | None:
    """Return the class of the masters that an option asks for; None if there are to be none."""
    return masters if isinstance(masters, type) else Master if masters else None


def set_master(weight: Tensor, start: Tensor, kind: type[Master]) -> None:
    """Let a half weight's master be `start`, its value from before it was rounded."""
    master = _MASTERS.get(weight)
    if master is None:
        _MASTERS[weight] = kind(weight, start)
    else:
        master.start_from(weight, start)


def master_for(weight: Tensor, kind: type[Master] = Master) -> Master:
    """Return a half weight's master; if it has none yet, a new one from the half value."""
    master = _MASTERS.get(weight)
    if master is None or master.value.device != weight.device:
        master = kind(weight, weight if master is None else master.current(weight))
        _MASTERS[weight] = master
    return master


def master_behind(weight: Tensor) -> Master | None:
    """Return the master of a weight that is half now, if it has one."""
    return _MASTERS.get(weight) if weight.dtype in HALF else None


def exact_value(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight's fp32 value, its master's if it is half; None if it has none."""
    master = master_behind(weight)
    if master is not None:
        return master.current(weight).detach().clone()
    return weight.detach().clone() if weight.dtype == torch.float32 else None


def widen(weight: Tensor) -> None:
    """Store a half weight in fp32 where its master is: a write to one is a write to the other."""
    master = master_for(weight)
    weight.data = master.current(weight).detach()
    master.half = weight.dtype
    mark_known([(weight, master)])


def rebind_master(weight: Tensor, master: Master) -> None:
    """Give a weight that was copied the copy of its master, and its format."""
    if weight.dtype not in HALF and master.half in HALF:  # Without its optimizer a copy is fp32.
        exact, weight.data = weight.data, weight.data.to(master.half)
        master.start_from(weight, exact)
    _MASTERS[weight] = master


class Masters(dict[Tensor, Tensor]):
    """Each parameter of an optimizer with the tensor in its groups that stands for it, in order.

    Args:
        starts: fp32 values from before the rounding, by half parameter. They may include
            parameters that no group has yet: a group that is added later starts from them.
        kind: of the masters that are made; None makes every parameter its own master.

    Attributes:
        kind: see above.
        half: the half parameters that have a master, each with it.
        device: of all parameters.
    """

    def __init__(self, starts: Mapping[Tensor, Tensor], kind: type[Master] | None) -> None:
        super().__init__()
        for parameter, start in starts.items():
            if parameter.dtype in HALF:
                set_master(parameter, start.clone(), kind or Master)
        self.kind = kind
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
            self[parameter] = stepped = part_of(parameter)
            self._sharded |= stepped is not parameter
            half = parameter.dtype in HALF
            if half and self.kind is None:
                _MASTERS.pop(parameter, None)
            elif half and self.kind is not None:
                master = self.half[parameter] = master_for(parameter, self.kind)
                sync_from_weights([(parameter, master)])
                self[parameter] = stepped = master.value
                stepped.requires_grad_(parameter.requires_grad)
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[stepped] = {k: to_fp32(v) for k, v in state.items()}
            group["params"][index] = stepped

    def pop_grads(self) -> dict[Tensor, Tensor]:
        """Take the gradients, by master, from parameters and masters.

        A gradient that a user's backward pass left at a master is added in fp32.
        """
        popped = {}
        for parameter, master in self.items():
            gradient, of_master = parameter.grad, None if master is parameter else master.grad
            if gradient is None:
                gradient = of_master
            elif of_master is not None:
                wide = gradient.float()
                # torch adds a sparse gradient to a dense one, and not the other way round.
                gradient = wide + of_master if of_master.is_sparse else of_master + wide
            if gradient is not None:
                popped[master] = part_of(gradient) if self._sharded else gradient
                parameter.grad = master.grad = None
        return popped

    def map_state(
        self, change: Callable[[Tensor, Tensor], Tensor], state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's `state_dict` with the tensors of sharded parameters changed."""
        mapped = dict(state["state"])
        for index, parameter in enumerate(self):
            if is_sharded(parameter) and index in mapped:
                mapped[index] = map_tensors(partial(change, parameter), mapped[index])
        return {**state, "state": mapped}

    def _check(self, parameters: list[Tensor]) -> None:
        if not self and parameters:
            self.device = parameters[0].device
        for index, parameter in enumerate(parameters):
            what = f"optimizer: parameter {index} of shape {tuple(parameter.shape)} is"
            if parameter.is_complex():
                raise ConfigError(
                    f"{what} {parameter.dtype}; masters hold real numbers: store it as two real "
                    "parameters"
                )
            half = self.kind is not None and parameter.dtype in HALF
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
    for name in sorted(present.keys() ^ weights.keys()):
        what = "is missing from" if name in present else "is unknown to the model but in"
        raise CheckpointError(f"weights: {name!r} {what} the checkpoint; load the model it is of")
    for name, tensor in present.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"weights: {name!r} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model; load the model it is of"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        master = _MASTERS.get(parameter)  # Also of one that was widened to fp32.
        if master is not None:
            master.start_from(parameter, weights[name])
            present.pop(name, None)
    for name, tensor in present.items():
        source = weights[name]
        if tensor.dtype in HALF:  # A buffer, if there are no op lists.
            source = source.clamp(torch.finfo(tensor.dtype).min, torch.finfo(tensor.dtype).max)
        part_of(tensor).copy_(part_for(tensor, source))
