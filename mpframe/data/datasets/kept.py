"""Samples that are the same in every epoch: made once, then kept in memory."""

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.facts import require_whole
from mpframe.tree import map_tensors, tensors_in


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
