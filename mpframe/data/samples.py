"""Samples that are held out of the training, and samples that are drawn when they are read."""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.ranges import require_whole
from mpframe.core.tree import map_tensors, tensors_in
from mpframe.data.loading import keyed_uniform


def hold_out(targets: Tensor, one_in: int, parts: int = 1) -> list[Tensor]:
    """Hold out one sample in `one_in` of every class; `parts` parts share these in turns.

    The samples are lined up by class, in a fixed random order within it: the split depends only on
    the targets [N]. Returns indices to train on, then of each part; each [n] int64, ascending.
    """
    shuffled = torch.from_numpy(keyed_uniform(1, range(len(targets)))).flatten().argsort()
    held = shuffled[targets[shuffled].argsort(stable=True)][::one_in]
    left = torch.ones(len(targets), dtype=torch.bool)
    left[held] = False
    return [left.nonzero().flatten(), *(held[part::parts].sort().values for part in range(parts))]


class Generated(Dataset[Any], ABC):
    """Samples that are drawn when they are first read: pure functions of the key and the index.

    They are kept up to `cache_bytes` in each process that loads. What is returned is a copy, so
    that whoever writes into a batch changes no later epoch.

    Args:
        count: how many.
        key: whole numbers; another key gives other samples.
        noise: standard deviation of the noise.
        cache_bytes: a whole number >= 0.
    """

    things = "samples"

    def __init__(self, count: int, key: tuple[int, ...], noise: float, cache_bytes: int) -> None:
        require_whole("dataset.cache_bytes", cache_bytes, least=0)
        self._count, self._key, self._noise, self._free = count, key, noise, cache_bytes
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"{index}: there are {self._count} {self.things}")
        if index not in self._kept:
            sample = self.drawn(index)
            size = sum(tensor.nbytes for tensor in tensors_in(sample))
            if size > self._free:
                return sample
            self._kept[index] = sample
            self._free -= size
        return map_tensors(Tensor.clone, self._kept[index])

    @abstractmethod
    def drawn(self, index: int) -> tuple[Tensor, Any]:
        """Draw a sample and its target."""

    def uniforms(self, count: int, *words: int) -> NDArray[np.float64]:
        """Return `count` numbers in [0, 1), others for other words behind the key."""
        drawn: NDArray[np.float64] = keyed_uniform(count, *self._key, *words)[0]
        return drawn

    def noisy(self, values: NDArray[np.float64], index: int) -> Tensor:
        """Add evenly distributed noise to the values of sample `index`, and return float32."""
        even = self.uniforms(values.size, index, 1).reshape(values.shape) - 0.5
        values += self._noise * math.sqrt(12) * even  # Even numbers over 1 deviate by 1 / sqrt(12).
        return torch.from_numpy(values).float()
