"""The check that a batch is finite, made on the host before the model sees it.

In the loss, NaN or inf from the data would look like a number that grew too large.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mpframe.errors import DataError
from mpframe.tree import named_tensors


def require_finite(
    batch: Any,
    indices: Sequence[int],
    split: str,
    place: tuple[int, int],
    samples: Sequence[Any] = (),
) -> None:
    """Refuse a batch that holds NaN or inf.

    Args:
        batch: any tree of tensors on the host.
        indices: its samples' indices in the dataset.
        split: what the samples are for, for the message.
        place: (epoch, the batch's number in it), for the message.
        samples: what the batch was made of, in the order of `indices`; empty if unknown.

    Raises:
        DataError: names the tensor and its sample, or all samples if it cannot be told which.
    """
    bad = _first_bad(batch)
    if bad is None:
        return
    whose, name = _in_samples(samples, indices) or (_by_row(bad[1], indices), bad[0])
    where = f" in its {name}" if name else ""
    raise DataError(
        f"dataset: {split} {whose} holds NaN or inf{where} (epoch {place[0]}, batch {place[1]}); "
        "every value must be finite: fix or remove the sample"
    )


def several(indices: Sequence[int]) -> str:
    """Words for the samples of a batch."""
    if list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return f"samples {indices[0]} to {indices[-1]}"
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"samples {', '.join(map(str, indices[:3]))}{more}"


def named_leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch or a sample with its path; of a pair they are `inputs`, `targets`."""
    if type(batch) is tuple and len(batch) == 2:
        return chain(named_tensors(batch[0], "inputs"), named_tensors(batch[1], "targets"))
    return named_tensors(batch)


def _first_bad(node: Any) -> tuple[str, Tensor] | None:
    return next(((name, t) for name, t in named_leaves(node) if not _is_finite(t)), None)


def _in_samples(samples: Sequence[Any], indices: Sequence[int]) -> tuple[str, str] | None:
    """The bad sample and its tensor, seen before they were put together."""
    for index, sample in sorted(zip(indices, samples, strict=False), key=lambda pair: pair[0]):
        bad = _first_bad(sample)
        if bad is not None:
            return f"sample {index}", bad[0]
    return None


def _by_row(tensor: Tensor, indices: Sequence[int]) -> str:
    """The bad sample, if the tensor has a row for each."""
    if tensor.shape[:1] != (len(indices),) or tensor.layout is not torch.strided:
        return f"one of {several(indices)}"
    rows = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
    return f"sample {min(index for index, bad in zip(indices, rows, strict=True) if bad)}"


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor
    if tensor.layout is not torch.strided:
        values = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    # If a value is NaN, both ends are. One pass for them is far cheaper than isfinite's mask.
    low, high = values.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())
