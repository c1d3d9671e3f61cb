"""Random numbers by key, the samples that are held out, and samples drawn when they are read."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.ranges import NOT_NEGATIVE, require, require_whole
from mpframe.core.tree import map_tensors, tensors_in

UInt64Array: TypeAlias = NDArray[np.uint64]
Word: TypeAlias = int | Sequence[int] | NDArray[np.integer]  # arrays of one length

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def hash_key(*words: Word) -> UInt64Array:
    """Fold words, integers modulo 2^64, into 64-bit states, one for each element of the longest."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mix64(state + _as_uint64(word) + _GAMMA)
    return state


def draw_uniforms(draws: int, *words: Word) -> NDArray[np.float64]:
    """Return `draws` uniforms in [0, 1) of 53 random bits for each key, [keys, draws]."""
    steps = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    bits = _mix64(hash_key(*words)[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _as_uint64(word: Word) -> UInt64Array:
    # At least 1-d: numpy wraps arrays silently, as modulo 2^64 wants, but warns for scalars.
    if isinstance(word, int):
        return np.array([word % 2**64], dtype=np.uint64)
    return np.asarray(word, dtype=np.int64).astype(np.uint64)


def hold_out(targets: Tensor, one_in: int, parts: int = 1) -> list[Tensor]:
    """Hold out one sample in `one_in` of every class, shared in turns by `parts` parts.

    The split depends only on the targets [N]. Returns the indices to train on, then the indices of
    each part, all [n] int64 and ascending.
    """
    shuffled = torch.from_numpy(draw_uniforms(1, range(len(targets)))).flatten().argsort()
    held = shuffled[targets[shuffled].argsort(stable=True)][::one_in]
    left = torch.ones(len(targets), dtype=torch.bool)
    left[held] = False
    return [left.nonzero().flatten(), *(held[part::parts].sort().values for part in range(parts))]


class BatchDataset(Dataset[Any], ABC):
    """A map-style dataset that makes whole batches, of which a sample is the smallest."""

    @abstractmethod
    def fetch_batch(self, indices: Sequence[int]) -> Any:
        """Return these samples as one batch, a tree of tensors."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        batch = self.fetch_batch([range(len(self))[index]])
        return map_tensors(itemgetter(0), batch)


class Generated(Dataset[Any], ABC):
    """Samples drawn when they are first read: `count` pure functions of `key` and their index.

    Each process that loads keeps up to `cache_bytes` of them, and returns copies, so that writing
    into a batch changes no later epoch. `noise` is a standard deviation.
    """

    def __init__(self, count: int, key: tuple[int, ...], noise: float, cache_bytes: int) -> None:
        require("dataset.noise", noise, NOT_NEGATIVE)
        require_whole("dataset.cache_bytes", cache_bytes, least=0)
        self._count, self._key, self._noise, self._free = count, key, noise, cache_bytes
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"{index}: there are {self._count} samples")
        if index not in self._kept:
            sample = self.draw(index)
            size = sum(tensor.nbytes for tensor in tensors_in(sample))
            if size > self._free:
                return sample
            self._kept[index] = sample
            self._free -= size
        return map_tensors(Tensor.clone, self._kept[index])

    @abstractmethod
    def draw(self, index: int) -> tuple[Tensor, Any]:
        """Draw a sample and its target."""

    def uniforms(self, count: int, *words: int) -> NDArray[np.float64]:
        """Return `count` numbers in [0, 1) by the key and these words."""
        drawn: NDArray[np.float64] = draw_uniforms(count, *self._key, *words)[0]
        return drawn

    def add_noise(self, values: NDArray[np.float64], index: int) -> Tensor:
        """Add uniform noise to the values of sample `index`, and return float32."""
        even = self.uniforms(values.size, index, 1).reshape(values.shape) - 0.5
        values += self._noise * math.sqrt(12) * even  # A uniform number deviates by 1 / sqrt(12).
        return torch.from_numpy(values).float()
