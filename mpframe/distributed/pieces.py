"""Tensors in pieces that are sent together: a large one alone, small ones with others."""

from collections.abc import Iterable, Iterator

from torch import Tensor

_LARGE = 2**22  # bytes of a tensor that is sent alone, from where it is
# Bytes that are sent together. Each piece has its own cost, and the last one is sent when there is
# nothing left to compute. Between two processes on a CPU this size took the least time.
_TOGETHER_ON_CPU = 2**22
_TOGETHER = 2**25


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in pieces, each in the place where its last tensor comes."""
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= _LARGE:
            yield [tensor]
            continue
        piece.append(tensor)
        size += tensor.nbytes
        if size >= (_TOGETHER_ON_CPU if tensor.is_cpu else _TOGETHER):
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
