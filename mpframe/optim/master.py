"""A master: the fp32 tensor behind one half weight, and the watch over that weight.

A weight has one master for as long as it lives, whatever optimizers come and go, and all of them
share it. A master writes its weight, rounded. Whatever else writes the weight (`load_state_dict`,
`copy_`, `clamp_`, a new `.data`) is adopted before the master is used again:

    m <- w    where w is not round(m); elsewhere m keeps the digits that half cannot hold

so a weight that was exchanged for a while and put back changes nothing.
"""

from collections.abc import Iterable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.optim.last_look import LastLook
from mpframe.tree import HALF

_MASTERS: MutableMapping[Tensor, "Master"] = WeakTensorKeyDictionary()


class Master:
    """The fp32 tensor behind a half weight.

    Args:
        weight: float16 or bfloat16.
        start: the value to begin with, of the weight's shape and any format; in fp32 it is `value`,
            not copied.

    Attributes:
        value: fp32, on the weight's device; the same tensor for good.
    """

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.value = start.detach().to(weight.device, torch.float32)
        self._format = weight.dtype
        self._seen = LastLook(weight)

    def current(self, weight: Tensor) -> Tensor:
        """`value`, after what others have written into the weight was adopted."""
        if self._seen.differs(weight):
            now, rounded = weight.detach(), torch.empty_like(self.value, dtype=self._format)
            with torch.no_grad():
                round_into([(rounded, self.value)])
                self.value.copy_(torch.where(now == rounded, self.value, now.float()))
            self.wrote(weight)
        return self.value

    def wrote(self, weight: Tensor) -> None:
        """Take the weight as it stands for the master's own rounding."""
        self._format = weight.dtype
        self._seen.renew(weight)


def master_behind(weight: Tensor) -> Master | None:
    """The master of a half weight that has one."""
    return _MASTERS.get(weight) if weight.dtype in HALF else None


def master_for(weight: Tensor) -> Master:
    """The master of a half weight; where it has none yet, a new one from the half value."""
    known = _MASTERS.get(weight)
    if known is None or known.value.device != weight.device:
        known = Master(weight, weight if known is None else known.value)
        _MASTERS[weight] = known
    return known


def remember(weight: Tensor, start: Tensor) -> None:
    """Let a half weight's master be `start`, its value from before it was rounded."""
    known = _MASTERS.get(weight)
    if known is None:
        _MASTERS[weight] = Master(weight, start)
    else:
        known.value.detach().copy_(start)
        known.wrote(weight)


def restore(weight: Tensor, master: Master) -> None:
    """Give a weight that was copied the copy of its master."""
    _MASTERS[weight] = master


def forget(weight: Tensor) -> None:
    """Let a weight have no master."""
    _MASTERS.pop(weight, None)


def copy_to_params(pairs: Iterable[tuple[Tensor, Master]]) -> None:
    """Round masters into their weights; beyond the format's range, to its end."""
    pairs = list(pairs)
    round_into((weight, master.value) for weight, master in pairs)
    for weight, master in pairs:
        master.wrote(weight)


def round_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, rounded to its format and saturated."""
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
