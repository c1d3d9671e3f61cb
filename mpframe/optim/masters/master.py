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

from mpframe.optim.masters.write_detector import WriteDetector, adopt_writes, mark_known
from mpframe.tree import HALF

_LARGE = 2**14  # values; fewer are clamped sooner than looked at
_MASTERS: MutableMapping[Tensor, "Master"] = WeakTensorKeyDictionary()


class Master(WriteDetector):
    """The fp32 tensor behind a half weight.

    Args:
        weight: float16 or bfloat16.
        start: the value to begin with, of the weight's shape and any format; in fp32 it is `value`,
            not copied.

    Attributes:
        value: fp32, on the weight's device; always the same tensor.
        half: the weight's format when it was last written from here.
    """

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.value = start.detach().to(weight.device, torch.float32)
        self.half = weight.dtype
        mark_known([(weight, self)])

    def current(self, weight: Tensor) -> Tensor:
        """`value`, after it has taken over what others wrote into the weight."""
        adopt_writes([(weight, self)])
        return self.value

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        """Take another value; `copy_to_params` writes it into the weight."""
        self.half = weight.dtype
        self.value.detach().copy_(start)

    @torch.no_grad()
    def adopt(self, weight: Tensor) -> Tensor | bool:
        """Take over what others have written into the weight; whether they wrote other values."""
        half = weight.dtype if weight.dtype in HALF else self.half
        now, rounded = weight.detach(), torch.empty_like(self.value, dtype=half)
        round_into([(rounded, self.value)])
        same = now == rounded
        self.value.copy_(torch.where(same, self.value, now.float()))
        self.half = weight.dtype
        return ~same.all()

    def publish(self, weight: Tensor) -> None:
        """Round `value` into the weight."""
        self.half = weight.dtype
        round_into([(weight, self.value)])


def master_behind(weight: Tensor) -> Master | None:
    """The master of a half weight that has one."""
    return _MASTERS.get(weight) if weight.dtype in HALF else None


def exact_value(weight: Tensor) -> Tensor | None:
    """A copy of the fp32 value of a weight, its master's if it is half; None if it has none."""
    held = master_behind(weight)
    if held is not None:
        return held.current(weight).detach().clone()
    return weight.detach().clone() if weight.dtype == torch.float32 else None


def master_for(weight: Tensor, kind: type[Master] = Master) -> Master:
    """The master of a half weight; if it has none yet, a new one from the half value."""
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


def widen(weight: Tensor) -> None:
    """Store a half weight in fp32, where its master is: what writes one writes the other."""
    master = master_for(weight)
    weight.data = master.current(weight).detach()
    master.half = weight.dtype
    mark_known([(weight, master)])


def restore(weight: Tensor, master: Master) -> None:
    """Give a weight that was copied the copy of its master, and its format."""
    if weight.dtype not in HALF and master.half in HALF:  # Without its optimizer a copy is fp32.
        exact, weight.data = weight.data, weight.data.to(master.half)
        master.start_from(weight, exact)
        copy_to_params([(weight, master)])
    _MASTERS[weight] = master


def forget(weight: Tensor) -> None:
    """Let a weight have no master."""
    _MASTERS.pop(weight, None)


def copy_to_params(pairs: Collection[tuple[Tensor, Master]]) -> None:
    """Round masters into their weights; beyond the format's range, to its end."""
    plain = []
    for weight, master in pairs:
        if type(master) is Master:  # As `publish` does it, but all at once.
            master.half = weight.dtype
            plain.append((weight, master.value))
        else:
            master.publish(weight)
    round_into(plain)
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
        # The copy rounds what lies beyond the range to inf; it belongs at the range's end. On a
        # CPU a look at a large weight takes a third of the time of holding it there.
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
