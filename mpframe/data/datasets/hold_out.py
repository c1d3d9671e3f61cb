"""Parts of a dataset that are kept from training, the same ones in every run."""

import torch
from torch import Tensor

from mpframe.data.keyed_random import keyed_uniform


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
