"""The fp32 value behind each half weight: its master.

Other code may write the weight (load_state_dict, init, copy_, clamp_, a new .data). The master sees
it by the weight's version, or on a CPU by its bits, and takes over the written value. On an
accelerator p.data.clamp_() leaves no trace. A weight has one master, whichever optimizers hold it.
"""

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.core.comm import part_for, part_of
from mpframe.core.errors import CheckpointError
from mpframe.core.tree import HALF

_SUMMED = 2**14  # words: a copy of fewer costs no more than their sums
_CHECKED = 2**14  # values: clamping fewer is cheaper than checking them

Pair = tuple[Tensor, "Master"]  # a half weight and its master
_MASTERS: MutableMapping[Tensor, "Master"] = WeakTensorKeyDictionary()


class _Seen:
    """A half weight as its master last wrote it. A new one matches no weight.

    `words` is a view of its bits, which keeps the memory: no other tensor gets this address. `bits`
    is a copy, or `summed` over rows, whose order it does not see. If None, values are not compared.
    """

    address, version = -1, -1
    stride: tuple[int, ...] = ()
    words: Tensor
    bits: Tensor | None = None
    summed = False

    @classmethod
    def at(cls, weight: Tensor) -> "_Seen":
        seen, words = cls(), weight.detach()
        rows = words.flatten(1) if weight.dim() > 1 else words.flatten()
        aligned = not (rows.shape[-1] % 4 or rows.storage_offset() % 4)
        if aligned and rows.numel() and weight.is_contiguous():
            words = rows.view(torch.int64)  # Over words of 16 bits sums take 60 times as long.
        seen.address, seen.stride, seen.words = weight.data_ptr(), weight.stride(), words
        if _compares_values(weight):
            large = words.dtype == torch.int64 and words.dim() > 1 and words.numel() >= _SUMMED
            seen.summed, seen.bits = large, torch.empty_like(words[:, 0] if large else words)
        return seen


def _compares_values(weight: Tensor) -> bool:
    return weight.is_cpu


def sync_from_weights(pairs: Iterable[Pair], *, look: bool = False) -> list[Tensor]:
    """Copy values that other code wrote into weights to their masters, and return which changed.

    `look`: compare values even if neither a version nor bits can show a write.
    """
    changed = []
    for weight, master in pairs:
        seen = master.seen
        same = seen.address == weight.data_ptr() and seen.version == weight._version
        same = same and seen.stride == weight.stride()
        if same and seen.bits is not None and not torch.compiler.is_compiling():
            same = torch.equal(seen.words.sum(-1) if seen.summed else seen.words, seen.bits)
        if not same or (look and seen.bits is None):
            changed.append(master.sync_from_weight(weight))
            mark_known([(weight, master)])
    return changed


def mark_known(pairs: Iterable[Pair]) -> None:
    """Note that each weight is now as its master wrote it."""
    for weight, master in pairs:
        seen = master.seen
        if seen.address != weight.data_ptr() or seen.stride != weight.stride():
            seen = master.seen = _Seen.at(weight)
        seen.version = weight._version
        if seen.bits is not None and not torch.compiler.is_compiling():
            seen.bits.copy_(seen.words.sum(-1) if seen.summed else seen.words)


class Master:
    """The fp32 value behind a half weight.

    It begins with `start`, of the weight's shape and any format. An fp32 tensor is not copied.

    Attributes:
        value: fp32, on the weight's device, always the same tensor in the optimizer's groups.
        half: the weight's format when the master last wrote it, or fp32 if it was widened.
        seen: the weight as it was then.
    """

    seen = _Seen()

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.value = start.detach().to(weight.device, torch.float32)
        self.half = weight.dtype
        mark_known([(weight, self)])

    def __getstate__(self) -> dict[str, Any]:
        # A copy has not seen the weight, whose copy has another address.
        return {name: value for name, value in vars(self).items() if name != "seen"}

    def current(self, weight: Tensor) -> Tensor:
        """Return the fp32 value, after a look at the weight."""
        sync_from_weights([(weight, self)])
        return self.value

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        """Take another value, and round it into the weight."""
        self.value.detach().copy_(start)
        round_to_weights([(weight, self)])

    @torch.no_grad()
    def sync_from_weight(self, weight: Tensor) -> Tensor:
        """Take over the weight's values. Return whether any differs from the rounded `value`."""
        half = weight.dtype if weight.dtype in HALF else self.half
        now = weight.detach().to(self.value.device)
        rounded = torch.empty_like(self.value, dtype=half)
        round_into([(rounded, self.value)])
        same = now == rounded
        self.value.copy_(torch.where(same, self.value, now.float()))
        self.half = weight.dtype
        return ~same.all()


def round_to_weights(pairs: Collection[Pair]) -> None:
    """Round each master into its weight after an update."""
    for weight, master in pairs:
        master.half = weight.dtype
    round_into([(weight, master.value) for weight, master in pairs])
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
        # The copy rounds values beyond the range to inf, which belong at the range's end. On a CPU
        # checking a large weight takes a third of the time of clamping it.
        to_clamp = []
        for weight in weights:
            if weight.is_cpu and weight.numel() >= _CHECKED and not torch.compiler.is_compiling():
                ends = torch.aminmax(weight)
                if ends.min.isfinite() & ends.max.isfinite():
                    continue
            to_clamp.append(weight)
        if to_clamp:
            torch._foreach_clamp_max_(to_clamp, torch.finfo(half).max)
            torch._foreach_clamp_min_(to_clamp, -torch.finfo(half).max)


def convert_buffer(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a buffer. Values beyond the range of half become its ends, infinities stay."""
    limit = torch.finfo(dtype).max if dtype in HALF else torch.inf
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def set_master(weight: Tensor, start: Tensor) -> None:
    """Set or create a half weight's master, with `start` as its value."""
    master = _MASTERS.get(weight)
    if master is None:
        _MASTERS[weight] = Master(weight, start)
    else:
        master.start_from(weight, start)


def master_for(weight: Tensor) -> Master:
    """Return a half weight's master. A missing one is made from the half value."""
    master = _MASTERS.get(weight)
    if master is None or master.value.device != weight.device:
        master = Master(weight, weight if master is None else master.current(weight))
        _MASTERS[weight] = master
    return master


def clear_master(weight: Tensor) -> None:
    """Remove a half weight's master, if it has one."""
    if weight.dtype in HALF:
        _MASTERS.pop(weight, None)


def master_behind(weight: Tensor) -> Master | None:
    """Return the master of a weight that is half now, if it has one."""
    return _MASTERS.get(weight) if weight.dtype in HALF else None


def exact_value(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight's fp32 value, if it or its master has one."""
    master = master_behind(weight)
    if master is not None:
        return master.current(weight).detach().clone()
    return weight.detach().clone() if weight.dtype == torch.float32 else None


def widen(weight: Tensor) -> None:
    """Store a half weight as fp32 in its master's memory: a write to one is a write to both."""
    master = master_for(weight)
    weight.data = master.current(weight).detach()
    master.half = weight.dtype
    mark_known([(weight, master)])


def rebind_master(weight: Tensor, master: Master) -> None:
    """Tie a copied weight to the copy of its master, and give it its half format back."""
    if weight.dtype not in HALF and master.half in HALF:  # Without its optimizer a copy is fp32.
        exact, weight.data = weight.data, weight.data.to(master.half)
        master.start_from(weight, exact)
    _MASTERS[weight] = master


def load_weights(
    model: nn.Module, masters: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Load parameters and buffers by name, as `MasterWeights.load_masters` says."""
    tensors = {n: value for n, value in model.state_dict().items() if isinstance(value, Tensor)}
    present = {**tensors, **masters}
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
        master = master_behind(parameter)
        if master is not None:
            master.start_from(parameter, weights[name])
            present.pop(name, None)
    for name, tensor in present.items():
        source = weights[name]
        if tensor.dtype in HALF:  # A buffer, if there are no op lists.
            source = convert_buffer(source, tensor.dtype)
        part_of(tensor).copy_(part_for(tensor, source))
