"""Makes a batch of token sequences of different lengths: dynamic padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(samples: Sequence[Mapping[str, Any]], multiple: int = 1) -> dict[str, Tensor]:
    """The samples as one batch, filled up with zeros, and the mask of what is no filling.

    Args:
        samples: dicts of the same names; 1-d sequences of whole numbers, all of a sample of one
            length and `input_ids` among them, or single numbers.
        multiple: the batch is as long as its longest sample, rounded up to a multiple of this.

    Returns:
        int64: [N, T] of each sequence, [N] of each number, and `attention_mask` [N, T] of 0 and 1.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = -(-longest // multiple) * multiple
    batch = {name: _joined([sample[name] for sample in samples], length) for name in samples[0]}
    ones = [torch.ones(len(sample["input_ids"])) for sample in samples]
    batch["attention_mask"] = _joined(ones, length)
    return batch


def _joined(values: Sequence[Any], length: int) -> Tensor:
    rows = [torch.as_tensor(value, dtype=torch.int64) for value in values]
    if rows[0].dim() == 0:
        return torch.stack(rows)
    filled = pad_sequence(rows, batch_first=True)
    return torch.nn.functional.pad(filled, (0, length - filled.shape[1]))
