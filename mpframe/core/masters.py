"""The fp32 tensor behind each parameter: its master, or the parameter itself if it is fp32.

A `Master` stands behind one half weight. It is read, written, and rounded into the weight. Other
code may write the weight behind the optimizer's back (load_state_dict, init, copy_, clamp_, .data).
The master notices this by the weight's version, or by a sum of its bits where no version tells, and
takes the written value over before the next step.

`Masters` holds the masters of one optimizer, in the order of its groups.
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
from mpframe.core.gradients import Gradients, measure_grads
from mpframe.core.tree import HALF, map_tensors, to_fp32

_SUMMED = 2**14  # words; a copy of fewer costs no more than their sums


class WriteDetector:
    """A half weight as its master last wrote it.

    Attributes:
        address: where its memory is; -1 before the first time.
        version: its version counter.
        words: a view of its bits. It keeps the memory, so that no other tensor gets this address.
        bits: a copy of `words`, or the sums of its rows; None if values are not compared.
        summed: which of the two it is.
    """

    address: int = -1
    version: int
    words: Tensor
    bits: Tensor | None
    summed: bool

    def __getstate__(self) -> dict[str, Any]:
        # These are left out, because the copy of a weight has another address.
        return {k: v for k, v in vars(self).items() if k not in WriteDetector.__annotations__}

    def sync_from_weight(self, weight: Tensor, noticed: bool) -> Tensor | bool:
        """Take over the weight's values; return whether others than the master's were written."""
        raise NotImplementedError


def sync_from_weights(
    pairs: Iterable[tuple[Tensor, WriteDetector]], *, look: bool = False
) -> list[Tensor | bool]:
    """Let each master take over the values that others have written into its weight.

    With `look` also where no counter tells. Returns for each of them whether values have changed.
    """
    changed = []
    for weight, last in pairs:
        same = last.address == weight.data_ptr() and last.version == weight._version
        if same and last.bits is not None:
            same = torch.equal(_sums(last.words) if last.summed else last.words, last.bits)
        if look or not same:
            changed.append(last.sync_from_weight(weight, not same))
            mark_known([(weight, last)])
    return changed


def mark_known(pairs: Iterable[tuple[Tensor, WriteDetector]]) -> None:
    """Note that each weight is now as its master wrote it."""
    for weight, last in pairs:
        if last.address != weight.data_ptr():
            _move(last, weight)
        last.version = weight._version
        if last.summed:
            last.bits = _sums(last.words)
        elif last.bits is not None:
            last.bits.copy_(last.words)


def _move(last: WriteDetector, weight: Tensor) -> None:
    words = _words(weight)
    large = words.dtype == torch.int64 and words.dim() > 1 and words.numel() >= _SUMMED
    last.address, last.words = weight.data_ptr(), words
    last.summed = large and _values_count(weight)
    last.bits = torch.empty_like(words) if _values_count(weight) else None


def _sums(words: Tensor) -> Tensor:
    return words.sum(-1)


def _values_count(weight: Tensor) -> bool:
    return weight.is_cpu


def _words(weight: Tensor) -> Tensor:
    """Return a view of the weight's bits, 64 at a time if its rows allow it; else as it is.

    The sums take 60 times as long over words of 16 bits.
    """
    rows = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach().flatten()
    whole = weight.is_contiguous() and not (rows.shape[-1] % 4 or rows.storage_offset() % 4)
    return rows.view(torch.int64) if whole else weight.detach()


_CHECKED = 2**14  # below this many values, clamping is cheaper than checking
_MASTERS: MutableMapping[Tensor, "Master"] = WeakTensorKeyDictionary()


class Master(WriteDetector):
    """The fp32 tensor behind a half weight. Another kind of master overrides all methods.

    Args:
        weight: float16 or bfloat16.
        start: the value to begin with, of the weight's shape and any format; in fp32 it is `value`,
            not copied.

    Attributes:
        value: fp32, on the weight's device, in the optimizer's groups; always the same tensor.
        half: the weight's format when it was last written from here.
    """

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.value = start.detach().to(weight.device, torch.float32)
        self.half = weight.dtype
        mark_known([(weight, self)])

    def current(self, weight: Tensor) -> Tensor:
        """Return the fp32 value, with what others wrote into the weight."""
        sync_from_weights([(weight, self)])
        return self.value

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        """Take another value; `copy_to_params` writes it into the weight."""
        self.half = weight.dtype
        self.value.detach().copy_(start)

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

    # Both take pairs of a weight and a master of this kind, so that an update takes few calls.

    materialize = staticmethod(sync_from_weights)  # `value` is there and current, for an update.

    @staticmethod
    def round_to_weights(pairs: "Collection[Pair]") -> None:
        """Round each `value` into its weight after an update."""
        rounded = []
        for weight, master in pairs:
            master.half = weight.dtype
            rounded.append((weight, master.value))
        round_into(rounded)
        mark_known(pairs)


Pair = tuple[Tensor, Master]  # a half weight and its master


def by_kind(pairs: Iterable[Pair]) -> dict[type[Master], list[Pair]]:
    """Group the pairs by the class of the master."""
    kinds: dict[type[Master], list[Pair]] = {}
    for weight, master in pairs:
        kinds.setdefault(type(master), []).append((weight, master))
    return kinds


def copy_to_params(pairs: Iterable[Pair]) -> None:
    """Round masters into their weights; beyond the format's range, to its end."""
    for kind, alike in by_kind(pairs).items():
        kind.round_to_weights(alike)


def master_behind(weight: Tensor) -> Master | None:
    """Return the master of a half weight, if it has one."""
    return _MASTERS.get(weight) if weight.dtype in HALF else None


def known_master(weight: Tensor) -> Master | None:
    """Return the master of a weight, also of one that was widened to fp32."""
    return _MASTERS.get(weight)


def exact_value(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight's fp32 value, its master's if it is half; None if it has none."""
    master = master_behind(weight)
    if master is not None:
        return master.current(weight).detach().clone()
    return weight.detach().clone() if weight.dtype == torch.float32 else None


def master_for(weight: Tensor, kind: type[Master] = Master) -> Master:
    """Return a half weight's master; if it has none yet, a new one from the half value."""
    known = _MASTERS.get(weight)
    if known is None or known.value.device != weight.device:
        known = kind(weight, weight if known is None else known.current(weight))
        _MASTERS[weight] = known
    return known


def remember(weight: Tensor, start: Tensor, kind: type[Master] = Master) -> None:
    """Let a half weight's master be `start`, its value from before it was rounded."""
    known = _MASTERS.get(weight)
    if known is None:
        _MASTERS[weight] = kind(weight, start)
    else:
        known.start_from(weight, start)
        mark_known([(weight, known)])


def clear_master(weight: Tensor) -> None:
    """Let a weight have no master."""
    _MASTERS.pop(weight, None)


def rebind_master(weight: Tensor, master: Master) -> None:
    """Give a weight that was copied the copy of its master, and its format."""
    if weight.dtype not in HALF and master.half in HALF:  # Without its optimizer a copy is fp32.
        exact, weight.data = weight.data, weight.data.to(master.half)
        master.start_from(weight, exact)
        copy_to_params([(weight, master)])
    _MASTERS[weight] = master


def widen(weight: Tensor) -> None:
    """Store a half weight in fp32 where its master is: a write to one is a write to the other."""
    master = master_for(weight)
    weight.data = master.current(weight).detach()
    master.half = weight.dtype
    mark_known([(weight, master)])


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
