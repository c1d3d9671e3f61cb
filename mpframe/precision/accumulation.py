"""The gradients of several micro-batches, summed in fp32 and averaged over the good ones.

    g = sum_i g_i / n      over the n micro-batches i whose gradients are finite

In half the sum would lose small terms, and one inf would spoil the whole window. The verdict on a
micro-batch stays on the device: a bad one adds zeros.
"""

import torch
from torch import Tensor

from mpframe.precision.gradients import to_fp32, unscale, values_of


class Window:
    """The micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._amaxes: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._amaxes)

    def add(self, gradients: dict[Tensor, Tensor], amax: Tensor) -> None:
        """Add one micro-batch.

        Args:
            gradients: fp32 and unscaled, by master.
            amax: 0-d fp32, the largest |gradient|; inf or nan drops the micro-batch.
        """
        bad = ~torch.isfinite(amax)
        for master, gradient in gradients.items():
            clean = _zero_where(bad, gradient)
            kept = self._sums.get(master)
            self._sums[master] = clean if kept is None else to_fp32(kept + clean)
        self._amaxes.append(amax)

    def take_mean(self) -> dict[Tensor, Tensor]:
        """The mean over the good micro-batches, by master; zeros where all were bad.

        The sums are divided where they stand and given away: the window holds them no longer.
        """
        sums, self._sums = self._sums, {}
        good = (~self.bad()).sum().clamp(min=1)
        unscale(values_of(sums.values()), good.float())
        return sums

    def bad(self) -> Tensor:
        """1-d bool: which micro-batches were dropped."""
        return ~torch.isfinite(torch.stack(self._amaxes))

    def amax(self) -> Tensor:
        """0-d fp32: the largest |gradient| of any micro-batch; inf or nan where one was dropped."""
        return torch.stack(self._amaxes).max()

    def clear(self) -> None:
        """Forget everything: the next micro-batch opens a new window."""
        self._sums.clear()
        self._amaxes.clear()


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` itself, or zeros of its kind where `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, 0.0, gradient)
    values = torch.where(bad, 0.0, gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
