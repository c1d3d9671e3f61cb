"""Whether a weight was written since its master wrote it.

Most writes raise the tensor's version counter, and a new `.data` has another address. A
`w.data.clamp_()` does neither, so on a CPU the values are also compared: the values of a small
weight, or the sums over the bits of each row of a large one. On an accelerator this would make
every step wait for the device, so it is not done there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LARGE = 2**14  # words; a copy of fewer costs no more than their sums


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
    large = words.dtype == torch.int64 and words.dim() > 1 and words.numel() >= _LARGE
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
