"""A batch as evidence keeps it: tensors, numbers and text in tuples, lists and dicts.

A file that names a class can make its reader import anything, so evidence names no class. Named
tuples and dataclasses are saved as dicts. They get their classes back from an example, which is a
batch that the run's own dataset makes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpframe.tree import fields_of, with_fields

_KEPT = (bool, int, float, str, type(None))


def is_plain(batch: Any) -> bool:
    """Whether all containers in a batch are tuples, lists and dicts themselves."""
    if type(batch) in (tuple, list):
        return all(map(is_plain, batch))
    if type(batch) is dict:
        return all(map(is_plain, batch.values()))
    return not isinstance(batch, tuple | list) and not fields_of(batch)


def plain(batch: Any) -> Any:
    """The batch in tuples, lists and dicts alone, its tensors on the CPU.

    Arrays become tensors. Other objects, for example paths, become their text.
    """
    if isinstance(batch, Tensor):
        return _own_storage(batch.detach().cpu())
    if isinstance(batch, dict) or fields_of(batch):
        return {name: plain(item) for name, item in fields_of(batch).items()}
    if isinstance(batch, tuple | list):
        return (list if isinstance(batch, list) else tuple)(map(plain, batch))
    if isinstance(batch, np.ndarray | np.generic):
        return torch.as_tensor(batch) if isinstance(batch, np.ndarray) else batch.item()
    return batch if type(batch) in _KEPT else str(batch)


def as_in(example: Any, batch: Any) -> Any:
    """A plain batch with the classes that the containers of `example` have.

    Args:
        example: a batch of the same form; its lists may be of another length.
        batch: as `plain` returned it. What has no counterpart in `example` stays as it is.
    """
    if isinstance(batch, dict):
        known = fields_of(example)
        fields = {name: as_in(known.get(name), item) for name, item in batch.items()}
        return with_fields(example, fields) if known.keys() == fields.keys() else fields
    if isinstance(batch, tuple | list) and isinstance(example, tuple | list) and example:
        last = len(example) - 1
        return type(batch)(as_in(example[min(n, last)], item) for n, item in enumerate(batch))
    return batch


def _own_storage(tensor: Tensor) -> Tensor:
    """Of a view the whole storage would be saved, which may be a whole dataset."""
    if tensor.layout is not torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
