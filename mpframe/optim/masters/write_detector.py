"""Whether a weight was written since its master wrote it.

Most writes raise the tensor's version counter, and a new `.data` has another address. A
`w.data.clamp_()` does neither, so on a CPU the values are compared, too: the values of a small
weight, or the sums over the bits of each row of a large one. On an accelerator this would make
every step wait for the device, so it is not done there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LARGE = 2**14  # words; a copy of fewer costs no more than their sums


class WriteDetector:
    """What a half weight was like when its master last wrote it.

    Attributes:
        address: where its memory is; -1 before the first time.
        version: its version counter.
        words: a view of its bits. It keeps the memory, so that no other tensor gets this address.
        bits: a copy of `words`, or the sums of its rows; None if the values do not count.
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

    joined = True  # whether the master has its memory

    def adopt(self, weight: Tensor) -> Tensor | bool:
        """Take over what others have written into the weight; whether they wrote other values."""
        raise NotImplementedError

    def join(self, weight: Tensor) -> None:
        """Let the master have its memory, and what it stands for."""


def adopt_writes(watched: Iterable[tuple[Tensor, WriteDetector]], *, join: bool = False) -> None:
    """Let each master take over what others have written since it was marked as known.

    Args:
        watched: weights with their masters.
        join: let each master have its memory, too.
    """
    watched = list(watched)
    for weight, last in find_written(watched):
        last.adopt(weight)
        mark_known([(weight, last)])
    for weight, last in watched if join else ():
        if not last.joined:
            last.join(weight)


def find_written(
    watched: Iterable[tuple[Tensor, WriteDetector]],
) -> list[tuple[Tensor, WriteDetector]]:
    """Return those whose weight something else has written since it was marked as known."""
    written = []
    for weight, last in watched:
        same = last.address == weight.data_ptr() and last.version == weight._version
        if same and last.bits is not None:
            same = torch.equal(_sums(last.words) if last.summed else last.words, last.bits)
        if not same:
            written.append((weight, last))
    return written


def mark_known(watched: Iterable[tuple[Tensor, WriteDetector]]) -> None:
    """Note that each weight is now as its master wrote it."""
    for weight, last in watched:
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
    """A view of the weight's bits, 64 at a time if its rows allow it; otherwise as it is.

    The sums take 60 times as long over words of 16 bits.
    """
    rows = weight.detach().flatten(1) if weight.dim() > 1 else weight.detach().flatten()
    whole = weight.is_contiguous() and not (rows.shape[-1] % 4 or rows.storage_offset() % 4)
    return rows.view(torch.int64) if whole else weight.detach()
