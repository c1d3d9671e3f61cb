"""A last look at a batch on the host: NaN or inf in the data is the data's fault and is said so.

Found later, inside a loss, it would look like a number that grew too large.
"""

import torch
from torch import Tensor

from mpframe.data.task import Batch
from mpframe.errors import DataError


def require_finite(batch: Batch, ids: Tensor, split: str, place: tuple[int, int]) -> None:
    """Refuse a batch that holds NaN or inf.

    Args:
        batch: (inputs, targets) on the host.
        ids: [N] the samples' indices in the dataset.
        split: what the samples are for, for the message.
        place: (epoch, the batch's number in it), for the message.

    Raises:
        DataError: names the first bad sample and the tensor.
    """
    for name, tensor in zip(("inputs", "targets"), batch, strict=True):
        if not _is_finite(tensor):
            rows = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
            raise DataError(
                f"dataset: {split} sample {int(ids[rows].min())} holds NaN or inf in its {name} "
                f"(epoch {place[0]}, batch {place[1]}); every value must be finite: "
                "mend or remove the sample"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # Both ends carry NaN along, and one pass over them is far cheaper than isfinite's mask.
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))
