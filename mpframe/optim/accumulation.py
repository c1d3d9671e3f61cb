"""The gradients of several micro-batches, summed in fp32 and averaged over the good ones.

    g = sum_i g_i / n      over the n micro-batches i whose gradients are finite

In half the sum would lose small terms, and one inf would spoil the whole window. The verdict on a
micro-batch stays on the device: a bad one adds zeros.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.optim.gradients import Gradients, measured, not_finite


@dataclass(frozen=True, slots=True)
class StepGradients:
    """All that the backward passes of one step left behind.

    Attributes:
        gradients: what the update is computed from.
        largest: 0-d fp32, the amax that a scaler is told. If the step was accumulated, it is the
            largest amax of its micro-batches, because each of them was computed in half by itself;
            inf or nan if one overflowed.
        dropped: 0-d int64, micro-batches left out; None if the step was not accumulated.
        spent: the step before has consumed the gradients, and there are no new ones.
    """

    gradients: Gradients
    largest: Tensor
    dropped: Tensor | None = None
    spent: bool = False


class Accumulator:
    """Sums of the gradients of the micro-batches of one optimizer step, in fp32."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._amaxes: list[Tensor] = []

    def add(self, gradients: Gradients) -> None:
        """Use up one micro-batch; if its amax is inf or nan it adds nothing and does not count."""
        bad = not_finite(gradients.amax)
        for master in list(gradients.by_master):
            clean = _zero_where(bad, *gradients.take([master]))
            kept = self._sums.get(master)
            self._sums[master] = clean if kept is None else kept + clean
        self._amaxes.append(gradients.amax)

    def mean(self) -> StepGradients:
        """The mean over the good micro-batches; its amax is inf if there is none.

        It is computed in the memory of the sums: nothing can be added afterwards.
        """
        amaxes = torch.stack(self._amaxes)
        bad = not_finite(amaxes)
        good = (~bad).sum().clamp(min=1).float()
        mean = measured(self._sums.items(), good, bad.device)
        mean = replace(mean, amax=torch.where(bad.all(), torch.inf, mean.amax))
        return StepGradients(mean, amaxes.max(), dropped=bad.sum())


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` itself, or zeros of its kind if `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, 0.0, gradient)
    values = torch.where(bad, 0.0, gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
