"""Samples that are held out of the training, or kept in memory after their first use."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.ranges import require_whole
from mpframe.core.tree import map_tensors, tensors_in
from mpframe.data.loading import keyed_uniform


def hold_out(targets: Tensor, one_in: int, parts: int = 1) -> list[Tensor]:
    """Hold out one sample in `one_in` of every class.

    The samples are lined up by class, in a fixed random order within it. Each `one_in`-th of them
    is held out, and the parts take turns. So the split depends on the targets alone, on no seed.

    Args:
        targets: [N] class numbers.
        one_in: >= 2.
        parts: how many parts share what is held out, >= 1.

    Returns:
        Indices of the samples to train on, then of each part; each [n] int64, ascending.
    """
    shuffled = torch.from_numpy(keyed_uniform(1, range(len(targets)))).flatten().argsort()
    held = shuffled[targets[shuffled].argsort(stable=True)][::one_in]
    left = torch.ones(len(targets), dtype=torch.bool)
    left[held] = False
    return [left.nonzero().flatten(), *(held[part::parts].sort().values for part in range(parts))]


class Kept(Dataset[Any]):
    """Keeps the samples of a dataset, each from its first use on, until the memory is used up.

    Each process that loads keeps its own. A sample is a copy, so that whoever writes into a batch
    changes no later epoch.

    Args:
        samples: map-style; a sample depends on its index alone.
        cache_bytes: the most that the kept tensors need in one process; 0 keeps none.

    Raises:
        ConfigError: `cache_bytes` is out of its range.
    """

    def __init__(self, samples: Any, cache_bytes: int) -> None:
        require_whole("dataset.cache_bytes", cache_bytes, least=0)
        self._samples, self._free = samples, cache_bytes
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index not in self._kept:
            sample = self._samples[index]
            size = sum(tensor.nbytes for tensor in tensors_in(sample))
            if size > self._free:
                return sample
            self._kept[index] = sample
            self._free -= size
        return map_tensors(Tensor.clone, self._kept[index])
