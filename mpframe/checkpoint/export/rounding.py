"""Weights in one format, rounded once.

The values are the fp32 masters (or their averages):

    w = round_to_half(m),  |m| beyond the format's range -> its end

so that no weight becomes inf; the number of such values is reported. Floating buffers are written
in the same format, except that an export in fp32 changes only half buffers. Integer and boolean
buffers are written as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.errors import CheckpointError, ConfigError
from mpframe.tree import HALVES

DTYPES = {"fp32": torch.float32, **HALVES}


@dataclass(frozen=True)
class Exported:
    """Converted weights.

    Attributes:
        tensors: by name, in the format asked for, contiguous, each with memory of its own.
        saturated: values clamped to the format's range, by the name of their tensor.
    """

    tensors: dict[str, Tensor]
    saturated: dict[str, int]


def converted(weights: Mapping[str, Tensor], dtype: str) -> Exported:
    """Round weights once to a format.

    Args:
        weights: parameters and buffers by name.
        dtype: `fp32`, `float16` or `bfloat16`.

    Raises:
        ConfigError: another format.
        CheckpointError: a weight is nan or inf, or complex or double and would lose more than
            the rounding.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"weights_dtype={dtype}: choose {', '.join(DTYPES)}")
    tensors, saturated = {}, {}
    for name, tensor in weights.items():
        _refuse_unfit(name, tensor)
        tensors[name], beyond = _rounded(tensor, DTYPES[dtype])
        if beyond:
            saturated[name] = beyond
    return Exported(tensors, saturated)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A copy in `dtype`, and how many values were clamped to its range."""
    if not tensor.is_floating_point():
        return tensor.clone(memory_format=torch.contiguous_format), 0
    limit = torch.finfo(dtype).max
    rounded = tensor.to(dtype)
    beyond = int((~torch.isfinite(rounded)).sum())
    clamped = rounded.clamp(-limit, limit)
    return clamped.clone(memory_format=torch.contiguous_format), beyond


def _refuse_unfit(name: str, tensor: Tensor) -> None:
    if tensor.is_complex() or tensor.dtype == torch.float64:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, which no export format holds; export fp32 weights"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds nan or inf; export an older checkpoint")
