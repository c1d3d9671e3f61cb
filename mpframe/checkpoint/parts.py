"""Tensors that ranks divide, in a checkpoint: each rank's file has its parts of them.

A part is written with the shape of its tensor and the index at which it begins, so any number of
ranks, or one process, can read it, however they divide the tensor. Ranks whose weights are divided
map the files into memory instead of reading them: a `Pieces` is put together only where it is used,
and only as far as it is used.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, tree_map_only, tree_map_with_path

from mpframe.checkpoint.state import address_of
from mpframe.checkpoint.untrusted import load_untrusted, raise_as_damaged
from mpframe.core.comm import cuts_of, ends_of, is_sharded, part_of
from mpframe.core.tree import map_tensors

Place = tuple[str | int, ...]  # the keys and indexes that lead to a value in a state
Index = tuple[int, ...]
Part = tuple[Index, Index, Tensor]
"""The shape of a whole tensor, the index at which a part of it begins, and the part."""

_DIVIDED = ("weights", "optimizer", "ema")  # the entries of a trainer's state that ranks may divide


class Pieces(Tensor):
    """A read-only tensor in mapped files, put together anew each time that it is used.

    A slice of it reads no more than the slice. `to` returns an ordinary tensor.
    """

    _pieces: Mapping[Index, Tensor]  # They do not overlap. By the index at which each begins.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Index, pieces: Mapping[Index, Tensor], dtype: torch.dtype) -> "Pieces":
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._pieces = pieces
        return made  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        """Return the tensor in memory."""
        whole = torch.zeros(self.shape, dtype=self.dtype)
        for start, piece in self._pieces.items():
            whole[tuple(map(slice, start, map(sum, zip(start, piece.shape, strict=True))))] = piece
        return whole

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.whole().to(*args, **kwargs)

    def cut(self, dim: int, start: int, end: int) -> "Pieces":
        """Return the values from `start` to `end` (excluded) along a dimension."""
        start, end, _ = slice(start, end).indices(self.shape[dim])
        pieces = {}
        for at, piece in self._pieces.items():
            low, high = max(start, at[dim]), min(end, at[dim] + piece.shape[dim])
            if low < high:
                inside = piece.narrow(dim, low - at[dim], high - low)
                pieces[(*at[:dim], low - start, *at[dim + 1 :])] = inside
        shape = (*self.shape[:dim], max(0, end - start), *self.shape[dim + 1 :])
        return Pieces(shape, pieces, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor and len(args) == 4:
            return args[0].cut(*args[1:])
        if func._schema.is_mutable and isinstance(args[0], Pieces):
            raise RuntimeError(f"{func}: a checkpoint's tensor is read-only; copy it first")
        args, kwargs = tree_map_only(Pieces, Pieces.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def split_off_parts(state: Any, copied: bool) -> tuple[Any, dict[Place, Part]]:
    """Return a state without its sharded tensors, and this rank's parts of them.

    copied: to the host, so that training does not change them. Else parts share the tensors'
    memory, except those that fill less than half of it, as all of it would be written.
    """
    parts, copies = dict[Place, Part](), dict[int, Tensor]()

    def copy_part(tensor: Tensor) -> Tensor:
        part, address = part_of(tensor), address_of(tensor)
        if not copied and part.untyped_storage().nbytes() <= 2 * part.nbytes:
            return part
        if not address or address not in copies:
            copies[address] = part.to("cpu", copy=True)
        return copies[address]

    def take_out(keys: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_sharded(value):
            return value
        if not is_copy(value):
            start = tuple(low for low, _ in ends_of(value.shape, cuts_of(value)))
            place = tuple(key.key if isinstance(key, MappingKey) else key.idx for key in keys)
            parts[place] = (tuple(value.shape), start, copy_part(value))
        return None

    return tree_map_with_path(take_out, state), parts


def is_copy(value: Any) -> bool:
    """Return whether another rank stands for this one, which holds the same part of a DTensor."""
    axes, mesh = enumerate(value.placements), value.device_mesh
    repeats = any(p.is_replicate() and mesh.get_local_rank(n) for n, p in axes)
    return repeats or int(mesh.mesh.min()) > 0  # Rank 0 and these ranks hold the same parts.


def put_together(state: dict[str, Any], files: Sequence[Path], in_parts: bool = False) -> None:
    """Put all ranks' parts into a state that was read, `in_parts` as `Pieces` in the files."""
    made = dict[Any, Tensor]()
    with raise_as_damaged(files[0].parent, "its parts do not fit together"):
        ranks: list[dict[Place, Part]] = [load_untrusted(path, mapped=True) for path in files]
        for place in dict.fromkeys(place for parts in ranks for place in parts):
            pieces = _assemble([parts[place] for parts in ranks if place in parts])
            key = (pieces.shape, *(piece.data_ptr() for piece in pieces._pieces.values()))
            if key not in made:
                lazy = in_parts and place[0] == "trainer" and place[1] in _DIVIDED
                made[key] = pieces if lazy else pieces.whole()
            _put(state, place, made[key])


def leave_in_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that was mapped, with the tensors that ranks may divide left in the file."""
    changes = {key: _as_pieces if key in _DIVIDED else Tensor.clone for key in state["trainer"]}
    trainer = {key: map_tensors(changes[key], held) for key, held in state["trainer"].items()}
    return {**map_tensors(Tensor.clone, {**state, "trainer": {}}), "trainer": trainer}


def _as_pieces(value: Tensor) -> Tensor:
    if not value.dim():  # An optimizer takes its count of steps as it is.
        return value.clone()
    return Pieces(tuple(value.shape), {(0,) * value.dim(): value}, value.dtype)


def _assemble(parts: Sequence[Part]) -> Pieces:
    """Return a tensor of all ranks' parts. ValueError if they are not exactly one."""
    shape, _, first = parts[0]
    pieces = {start: part for _, start, part in parts if part.numel()}
    alike = all((own, part.dtype) == (shape, first.dtype) for own, _, part in parts)
    inside = all(
        0 <= low <= low + size <= high
        for start, part in pieces.items()
        for low, size, high in zip(start, part.shape, shape, strict=True)
    )
    if not (alike and inside and prod(shape) == sum(part.numel() for part in pieces.values())):
        raise ValueError("one holds other tensors")
    return Pieces(shape, pieces, first.dtype)


def _put(state: Any, place: Place, whole: Tensor) -> None:
    for key in place[:-1]:
        state = state[key]
    if state[place[-1]] is not None:
        raise ValueError("the state has something in a divided tensor's place")
    state[place[-1]] = whole
