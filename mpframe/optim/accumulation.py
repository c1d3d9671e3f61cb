"""The gradients of several micro-batches, summed in fp32 and averaged over the good ones.

    g = sum_i n_i g_i / sum_i n_i      over the micro-batches i whose gradients are finite

where the loss of micro-batch i is the mean of n_i samples, so that a window is one large batch
however it is cut. The sums hold g_i n_i / n_1: where all counts are equal that is g_i, bit for bit.

In half the sum would lose small terms, and one inf would spoil the whole window. Whether a
micro-batch is bad stays on the device: a bad one adds zeros, and so does one that counts 0. With
several ranks, the sum also runs over them: they send their gradients once a window, unscaled and in
fp32. The only micro-batch of a single process is not summed at all: it stays as it is, in half.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from mpframe.distributed.world import World, weigh_
from mpframe.errors import ConfigError
from mpframe.optim.gradients import (
    Gradients,
    all_reduce_amax,
    as_count,
    measure_grads,
    not_finite,
)


class Accumulator:
    """Sums of the gradients of the micro-batches of one optimizer step, in fp32."""

    def __init__(self, reduced: Gradients | None = None) -> None:
        self._reduced = reduced  # The mean, if the ranks computed it during the backward pass.
        self._only: Gradients | None = None
        self._sums: dict[Tensor, Tensor] = {}
        self._amaxes: list[Tensor] = []
        self._counts: list[Tensor] = []  # 0-d float64; 0 for what adds nothing
        self._unit = torch.ones(())  # n_1

    def add(self, gradients: Gradients) -> None:
        """Use up one micro-batch; if its amax is inf or nan it adds nothing and does not count."""
        if self._only is None and not self._counts:
            self._only = gradients
            return
        if self._only is not None:
            self._sum(self._only)
            self._only = None
        if len(self._counts) == 1:
            self._clean_first()
        self._sum(gradients)

    def mean(self, masters: Iterable[Tensor], world: World) -> Gradients:
        """Return the mean over the good micro-batches of all ranks; its amax is inf without any.

        Computed in the memory of the sums. `masters` are in the order of the other ranks.
        """
        if self._reduced is not None:
            return self._reduced
        if self._only is not None:
            if world.size == 1:
                return _mean_of_one(self._only)
            self._sum(self._only)
        unit, count = self._unit, torch.stack(self._counts).sum()
        if world.size > 1 and world.sharding is None:  # Shards were summed in the backward pass.
            unit, count = world.mean(torch.stack([unit, count])).unbind()
            self._sum_over(world, list(masters), (self._unit / unit).float())
        amaxes = torch.stack(self._amaxes)
        bad = not_finite(amaxes)
        divisor = world.size * torch.where(count > 0, count / unit, 1.0).float()
        mean = measure_grads(self._sums, divisor, bad.device)
        # Reduced once more: what one of the ranks was sent may be damaged.
        amax = torch.where(count > 0, mean.amax, torch.inf)
        mean = all_reduce_amax(replace(mean, amax=amax), world)
        dropped = None if len(amaxes) == 1 else bad.sum()
        return replace(mean, scaler_amax=amaxes.max(), dropped=dropped)

    def _sum(self, gradients: Gradients) -> None:
        count = as_count(gradients.count, gradients.amax.device)
        added = torch.where(not_finite(gradients.amax), 0.0, count)
        if not self._amaxes:
            self._unit = count
        weight = (count / self._unit).float()
        for master in list(gradients.by_master):
            (gradient,) = gradients.pop_fp32([master])
            if self._amaxes:
                gradient = _zero_where(added == 0, gradient)
                gradient = _plus(self._sums.get(master), gradient, weight)
            self._sums[master] = gradient
        self._amaxes.append(gradients.amax)
        self._counts.append(added)

    def _clean_first(self) -> None:
        """Drop the first micro-batch if it is bad; as the only one it would skip the step."""
        bad = self._counts[0] == 0
        self._sums = {master: _zero_where(bad, grad) for master, grad in self._sums.items()}
        self._unit = torch.where(self._unit > 0, self._unit, 1.0)

    def _sum_over(self, world: World, masters: list[Tensor], weight: Tensor) -> None:
        """Add the sums of all ranks, with zeros for parameters that only other ranks used."""
        used = world.max_of([master in self._sums for master in masters])
        for master, anywhere in zip(masters, used, strict=True):
            if anywhere and master not in self._sums:
                self._sums[master] = torch.zeros_like(master)
        # In one order on all ranks.
        self._sums = {master: self._sums[master] for master in masters if master in self._sums}
        if any(gradient.is_sparse for gradient in self._sums.values()):
            raise ConfigError(
                "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the "
                "layer with sparse=False"
            )
        sums = list(self._sums.values())
        weigh_(sums, weight)
        world.sum_(sums)


def _mean_of_one(gradients: Gradients) -> Gradients:
    """Return the only micro-batch as it is; its amax is inf if it counts 0."""
    count, amax = gradients.count, gradients.amax
    if isinstance(count, Tensor) or not count:
        counts = as_count(count, amax.device) > 0
        return replace(gradients, amax=torch.where(counts, amax, torch.inf), scaler_amax=amax)
    return gradients


def _plus(kept: Tensor | None, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return kept + gradient * weight, or only the product if nothing is kept."""
    if kept is None:
        return gradient * weight
    if gradient.is_sparse:
        return kept + gradient * weight
    return torch.addcmul(kept, gradient, weight)  # One pass over the memory, not two.


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """Return `gradient`, or zeros of its kind if `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, 0.0, gradient)
    values = torch.where(bad, 0.0, gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
