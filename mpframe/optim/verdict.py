"""The verdict on a step, brought to the host.

Whether a step is skipped is decided on the device. The host has to wait for the device to know it,
so it reads the verdict in one place, `read`, once for each step and as late as it can:

    a plain optimizer            just before its `step`: its kernels cannot skip by themselves
    one that takes `found_inf`   for many steps together, when something depends on them; on a
                                 CPU, for which nobody waits, as a plain one
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What the host knows of a step of one optimizer.

    Attributes:
        skipped: nothing was changed.
        dropped: micro-batches that were left out.
    """

    skipped: bool
    dropped: int


def read(steps: Sequence[tuple[Tensor, Tensor | None]]) -> list[Verdict]:
    """THE HOST WAITS HERE for the device, and nowhere else in a step: one transfer for all steps.

    Args:
        steps: whether each was skipped, 0-d bool, and how many micro-batches it dropped, 0-d int64;
            None if it was not accumulated.
    """
    numbers = []
    for skipped, dropped in steps:
        numbers += [skipped] if dropped is None else [skipped, dropped]
    alone = len(numbers) == 1
    values = iter([numbers[0].item()] if alone else torch.stack(numbers).tolist())
    verdicts = []
    for _, dropped in steps:
        verdicts.append(Verdict(bool(next(values)), 0 if dropped is None else next(values)))
    return verdicts
