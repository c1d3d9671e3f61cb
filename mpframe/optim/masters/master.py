"""A master: the fp32 tensor behind one half weight, and the watch over that weight.

A weight has one master for its whole life, and all optimizers over the weight share it. A master
writes its weight, rounded. If anything else writes the weight (`load_state_dict`, `copy_`,
`clamp_`, a new `.data`), the master takes that value over before it is used:

    m <- w    where w is not round(m); elsewhere m keeps the digits that half cannot hold

So a weight that is replaced for a while and then put back changes nothing.
"""

from collections.abc import Collection, Iterable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.optim.masters.write_detector import WriteDetector, mark_known, sync_from_weights
from mpframe.tree import HALF

_LARGE = 2**14  # below this many values, clamping is cheaper than checking
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
            if weight.is_cpu and weight.numel() >= _LARGE:
                ends = torch.aminmax(weight)
                if ends.min.isfinite() & ends.max.isfinite():
                    continue
            held.append(weight)
        if held:
            torch._foreach_clamp_max_(held, torch.finfo(half).max)
            torch._foreach_clamp_min_(held, -torch.finfo(half).max)
