"""The gradients of several micro-batches, summed in fp32 and averaged over the good ones.

    g = sum_i g_i / n      over the n micro-batches i whose gradients are finite

In half the sum would lose small terms, and one inf would spoil the whole window. The verdict on a
micro-batch stays on the device: a bad one adds zeros.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.optim.gradients import Gradients, not_finite, unscaled


@dataclass(frozen=True)
class StepGradients:
    """All that the backward passes of one step left behind.

    Attributes:
        gradients: what the update is made of.
        seen: 0-d fp32, the amax a scaler is to be told. Of an accumulated step that of the largest
            micro-batch, for each was held in half alone; inf or nan where one overflowed.
        dropped: 0-d int64, micro-batches left out; None where the step was not accumulated.
    """

    gradients: Gradients
    seen: Tensor
    dropped: Tensor | None = None

    def bad(self, whole: bool) -> Tensor:
        """0-d bool, the verdict: not finite; of a `whole` window, where any micro-batch is not."""
        return not_finite(self.seen if whole else self.gradients.amax)


class Window:
    """The micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._amaxes: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._amaxes)

    def add(self, gradients: Gradients) -> None:
        """Add one micro-batch; where its amax is inf or nan it adds nothing and does not count."""
        bad = not_finite(gradients.amax)
        for master, gradient in gradients.by_master.items():
            clean = _zero_where(bad, gradient)
            kept = self._sums.get(master)
            self._sums[master] = clean if kept is None else kept + clean
        self._amaxes.append(gradients.amax)

    def bad(self) -> Tensor:
        """1-d bool: which micro-batches were dropped."""
        return not_finite(torch.stack(self._amaxes))

    def amax(self) -> Tensor:
        """0-d fp32: the largest |gradient| of any micro-batch; inf or nan where one was dropped."""
        return torch.stack(self._amaxes).max()

    def take_mean(self) -> Gradients:
        """The mean over the good micro-batches; its amax is inf where there is none. Closes."""
        bad, sums = self.bad(), self._sums
        self.clear()
        mean = unscaled(sums.items(), (~bad).sum().clamp(min=1).float(), bad.device)
        return replace(mean, amax=torch.where(bad.all(), torch.inf, mean.amax))

    def clear(self) -> None:
        """Forget everything: the next micro-batch opens a new window."""
        self._sums, self._amaxes = {}, []


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` itself, or zeros of its kind where `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, 0.0, gradient)
    values = torch.where(bad, 0.0, gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
