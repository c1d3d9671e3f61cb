"""Whether a weight was written since the last look at it.

Most writes raise the tensor's version counter, and a new `.data` has another address. A
`w.data.clamp_()` does neither, so on a CPU the values count too: those of a small weight are kept,
of a large one the sums of its rows' bits. On an accelerator that would make every step wait for the
device.
"""

from typing import Any

import torch
from torch import Tensor

_LARGE = 2**14  # words; a copy of fewer costs no more than their sums


class LastLook:
    """A half weight as it was when it was last looked at.

    Args:
        weight: float16 or bfloat16.
    """

    def __init__(self, weight: Tensor) -> None:
        self._address = -1
        self.renew(weight)

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": -1}  # The copy of a weight was never looked at.

    def renew(self, weight: Tensor) -> None:
        """Look again."""
        address = weight.data_ptr()
        if address != self._address:
            self._words = _words(weight)  # Held, so that nothing else comes to lie at this address.
        self._address, self._version = address, weight._version
        self._kept = self._bits(kept=True)

    def differs(self, weight: Tensor) -> bool:
        """Whether `weight` has been written since."""
        if self._address != weight.data_ptr() or self._version != weight._version:
            return True
        bits = self._bits()
        return bits is not None and not torch.equal(bits, self._kept)  # type: ignore[arg-type]

    def _bits(self, *, kept: bool = False) -> Tensor | None:
        """What the values are known by; where it is `kept` it does not change with them."""
        words = self._words
        if not words.is_cpu:
            return None
        if words.dtype == torch.int64 and words.dim() > 1 and words.numel() >= _LARGE:
            return words.sum(-1)
        return words.clone() if kept else words


def _words(weight: Tensor) -> Tensor:
    """A view of the weight's bits, 64 at a time where its rows allow; what is odd stays as it is.

    To sum words of 16 takes 60 times as long.
    """
    rows = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach().flatten()
    whole = weight.is_contiguous() and not (rows.shape[-1] % 4 or rows.storage_offset() % 4)
    return rows.view(torch.int64) if whole else weight.detach()
