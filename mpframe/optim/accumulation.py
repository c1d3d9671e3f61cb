"""The gradients of several micro-batches, summed in fp32 and averaged over the good ones.

    g = sum_i n_i g_i / sum_i n_i      over the micro-batches i whose gradients are finite

where the loss of micro-batch i is the mean of n_i samples, so that a window is one large batch
however it is cut. The sums hold g_i n_i / n_1: where all counts are equal that is g_i, bit for bit.

In half the sum would lose small terms, and one inf would spoil the whole window. The verdict on a
micro-batch stays on the device: a bad one adds zeros, and so does one that counts 0. If several
ranks step together, the sum runs over all of them, too: they send their gradients once a window,
unscaled and in fp32.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.distributed.world import World, weigh_
from mpframe.errors import ConfigError
from mpframe.optim.gradients import Gradients, agreed, as_count, measured, not_finite, ready


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

    def worst(self) -> Tensor:
        """0-d: inf or nan if a micro-batch was left out, or if the mean is not finite."""
        if self.dropped is None:
            return self.gradients.amax
        # Also of the mean: finite gradients may have a sum that is not.
        return torch.maximum(self.largest, self.gradients.amax)


class Accumulator:
    """Sums of the gradients of the micro-batches of one optimizer step, in fp32."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._amaxes: list[Tensor] = []
        self._counts: list[Tensor] = []  # 0-d float64; 0 for what adds nothing
        self._unit = torch.ones(())  # n_1

    def add(self, gradients: Gradients) -> None:
        """Use up one micro-batch; if its amax is inf or nan it adds nothing and does not count."""
        count = as_count(gradients.count, gradients.amax.device)
        added = torch.where(not_finite(gradients.amax), 0.0, count)
        if not self._amaxes:
            self._unit = count
        elif len(self._amaxes) == 1:
            self._clean_first()
        weight = (count / self._unit).float()
        for master in list(gradients.by_master):
            (gradient,) = gradients.take([master])
            if self._amaxes:
                gradient = _zero_where(added == 0, gradient)
                gradient = _plus(self._sums.get(master), gradient, weight)
            self._sums[master] = gradient
        self._amaxes.append(gradients.amax)
        self._counts.append(added)

    def mean(self, masters: Iterable[Tensor], world: World) -> StepGradients:
        """The mean over the good micro-batches of all ranks; its amax is inf if none counts.

        It is computed in the memory of the sums: nothing can be added afterwards.

        Args:
            masters: of all parameters, in the order of the other ranks.
            world: the ranks that step together.

        Raises:
            ConfigError: a gradient is sparse, and there are several ranks.
        """
        unit, count = self._unit, torch.stack(self._counts).sum()
        if world.size > 1 and world.sharding is None:  # Shards were summed in the backward pass.
            unit, count = world.mean(torch.stack([unit, count])).unbind()
            self._sum_over(world, list(masters), (self._unit / unit).float())
        amaxes = torch.stack(self._amaxes)
        bad = not_finite(amaxes)
        divisor = world.size * torch.where(count > 0, count / unit, 1.0).float()
        mean = measured(self._sums.items(), divisor, bad.device)
        # Agreed on once more: what the ranks were sent may be damaged on one of them.
        mean = agreed(replace(mean, amax=torch.where(count > 0, mean.amax, torch.inf)), world)
        dropped = None if len(amaxes) == 1 and world.size > 1 else bad.sum()
        return StepGradients(mean, amaxes.max(), dropped)

    def _clean_first(self) -> None:
        """Drop the first micro-batch if it is bad, as others follow it.

        Alone it needs no copy with zeros: nothing takes its sums, for the step is skipped.
        """
        bad = self._counts[0] == 0
        self._sums = {master: _zero_where(bad, own) for master, own in self._sums.items()}
        self._unit = torch.where(self._unit > 0, self._unit, 1.0)

    def _sum_over(self, world: World, masters: list[Tensor], weight: Tensor) -> None:
        """Add the sums of all ranks; a parameter that a rank did not use has zeros there."""
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


class Averaged(Accumulator):
    """The gradients of one backward pass, which the ranks have averaged while it ran.

    Args:
        means: by master, fp32 and unscaled; used up by `mean`.
        amax: 0-d fp32, their largest magnitude on any rank; None: it is looked for.
        before: 0-d fp32, the largest magnitude on any rank before they were averaged; inf or nan if
            any is. None: that of the means is told in its place.
        device: where they are.
    """

    def __init__(
        self,
        means: dict[Tensor, Tensor],
        amax: Tensor | None,
        before: Tensor | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._sums, self._amax, self._before, self._device = means, amax, before, device

    def mean(self, masters: Iterable[Tensor], world: World) -> StepGradients:
        """What the ranks have: inf or nan where one of them had it."""
        if self._amax is None:
            mean = agreed(measured(self._sums.items(), 1.0, self._device), world)
        else:
            mean = ready(self._sums, self._amax)
        return StepGradients(mean, mean.amax if self._before is None else self._before)


def _plus(kept: Tensor | None, gradient: Tensor, weight: Tensor) -> Tensor:
    """kept + gradient * weight; without anything kept the product."""
    if kept is None:
        return gradient * weight
    if gradient.is_sparse:
        return kept + gradient * weight
    return torch.addcmul(kept, gradient, weight)  # One pass over the memory, not two.


def _zero_where(bad: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` itself, or zeros of its kind if `bad`."""
    if not gradient.is_sparse:
        return torch.where(bad, 0.0, gradient)
    values = torch.where(bad, 0.0, gradient.values())
    return torch.sparse_coo_tensor(
        gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    )
