"""Tensors in pieces that are sent together: a large one alone, small ones with others."""

from collections.abc import Iterable, Iterator

from torch import Tensor

_TOGETHER = 2**23  # bytes; more would be sent late in a backward pass
_LARGE = 2**20  # bytes of a tensor that is sent alone, from where it is


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
        if size >= _TOGETHER:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
