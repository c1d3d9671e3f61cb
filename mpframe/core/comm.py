"""The processes of a run, and all that they agree on. `Comm` itself is a single process.

All ranks call its methods in the same order, so there is one code path for one process and for
many. The functions on parts are for sharded tensors (DTensors), of which each rank holds some rows.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mpframe.core.buffers import Buffers
from mpframe.core.tree import widest

T = TypeVar("T")
Scale = Tensor | float
Count = Tensor | int


class Loss(NamedTuple):
    """One loss on one micro-batch."""

    name: str  # "" if it is the only one
    value: Tensor  # 0-d, unscaled, detached
    scale: Scale  # 0-d fp32, or the number 1 if it was not scaled
    samples: Count  # how many samples (or tokens) `value` is the mean of


MicroBatch = tuple[Sequence[Loss], Tensor]
"""The losses on a micro-batch, and the amax of its gradients over all ranks, 0-d."""


class Comm:
    """A single process: it agrees with itself, at no cost.

    A step calls `begin_step`, `backward` for each loss of each micro-batch, `accumulate` after each
    micro-batch, and `reduce` once all gradients are there.

    Attributes:
        rank: this process's number, 0 to size - 1. Rank 0 writes the run's folder.
        size: how many processes there are.
        tensor: how many neighbouring ranks divide layers, and read the same share of the data.
        sharding: None if each process has all weights. Else it shards them, and `MasterWeights`
            asks its `amax_before_sums(amax, scale, stepped)` how large this rank's gradients were.
    """

    rank, size, tensor = 0, 1, 1
    sharding: Any = None

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the data, 0 to data_size - 1."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """How many shares the data has."""
        return self.size // self.tensor

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def begin_step(self, optimizer: Any, reduce: str) -> None:
        """Begin a step. Gradients are averaged `in_backward`, a single one, or `after_backward`."""

    def backward(self, loss: Tensor, scale: Scale, count: Count, inputs: Any) -> None:
        """Run the backward pass of loss * scale. `inputs` get gradients (None: all parameters).

        `loss` is 0-d, the mean over `count` samples. A `scale` of 1 leaves it as it is.
        """
        gradient = scale.clone() if isinstance(scale, Tensor) else None
        loss.backward(gradient, inputs=inputs)  # type: ignore[no-untyped-call]

    def accumulate(self, optimizer: Any, losses: Sequence[Loss]) -> Tensor:
        """Hand the optimizer a micro-batch's gradients. Return their amax over all ranks, 0-d."""
        scale: Any = losses[0].scale
        count: Any = losses[0].samples
        if len(losses) > 1:
            scale = {loss.name: loss.scale for loss in losses}
            count = {loss.name: loss.samples for loss in losses}
        amax: Tensor = optimizer.accumulate(scale, count)
        return amax

    def reduce(
        self, optimizer: Any, micro_batches: Sequence[MicroBatch], buffers: Buffers
    ) -> list[Tensor]:
        """Average the losses over the ranks (gradients follow in `step`), share rank 0's buffers.

        Return the mean of each loss over the good micro-batches of all ranks, 0-d.
        """
        losses, amaxes = zip(*micro_batches, strict=True)
        means = []
        for per_batch in zip(*losses, strict=True):
            single = len(per_batch) == self.size == 1
            means.append(per_batch[0].value if single else self.mean_loss(per_batch, amaxes))
        return means

    def mean_loss(self, losses: Sequence[Loss], amaxes: Sequence[Tensor]) -> Tensor:
        """Return the mean of a loss over the samples of all ranks' good micro-batches, 0-d."""
        values = torch.stack([loss.value for loss in losses])
        one = values.new_ones((), dtype=widest(values.device))
        counts = torch.stack([(one * loss.samples).detach() for loss in losses])
        if len(losses) > 1:  # A single bad one skips the step anyway.
            values = values.masked_fill(~(torch.stack([*amaxes]) < torch.inf), torch.nan)
            counts = counts.masked_fill(values.isnan(), 0.0)
        weights = (counts / counts.max()).float()  # exactly 1 where all are equal
        mean = apply_weight(values, weights).sum() / weights.sum()
        return self.mean(apply_weight(mean, self.weight(counts.sum())))

    def max(self, magnitude: Tensor) -> Tensor:
        """Return the largest of all ranks' values >= 0, elementwise: inf if one is inf or nan."""
        return magnitude

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks, on the device."""
        return value

    def weight(self, count: Tensor) -> Tensor:
        """Return this rank's count, 0-d float64, over all ranks' mean: exactly 1 if all agree."""
        return (count / self.mean(count)).float()

    def norm(self, of_part: Tensor) -> Tensor:
        """Return the 2-norm over all ranks from each rank's, 0-d, on the device."""
        return of_part

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the shares of the data in place, bit for bit the same on all ranks."""

    def max_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over all ranks, on the host."""
        return list(numbers)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, on the host."""
        return bool(self.max_of([flag])[0])

    def gather_object(self, value: T) -> list[T]:
        """Return all ranks' values, in rank order, on rank 0, and an empty list on the others."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def refuse_lost(self, error: BaseException | None) -> None:
        """Raise LostRankError if an error in a model that communicates says a rank is lost."""

    def report_failure(self, error: str) -> None:
        """Tell the other ranks why this one ends, for their error messages."""


SINGLE_PROCESS = Comm()


def apply_weight(value: Tensor, weight: Tensor) -> Tensor:
    """Return value * weight, or 0 if the weight is 0, because a mean over nothing is nan."""
    return (value * weight).masked_fill(weight == 0, 0.0)


def weigh_(values: list[Tensor], weight: Tensor) -> None:
    """Do the same in place, for many values and one weight, 0-d fp32."""
    if weight.is_cpu and weight == 1:  # A read from a CPU is free, a product is not.
        return
    torch._foreach_mul_(values, weight)
    for value in values:
        value.masked_fill_(weight == 0, 0.0)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a part of the tensor."""
    kind: Any = sys.modules.get("torch.distributed.tensor")  # Not imported: no DTensors.
    return kind is not None and isinstance(tensor, kind.DTensor)


def part_of(tensor: Any) -> Tensor:
    """Return the rows that this rank holds, sharing their memory: all if it is not sharded."""
    part: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return part


def part_for(place: Any, values: Tensor) -> Tensor:
    """Return this rank's part of `values`, which are whole or sharded like `place`.

    Values of another shape, such as an optimizer's count of steps, are returned unchanged.
    """
    if is_sharded(values) or not is_sharded(place) or values.shape != place.shape:
        return part_of(values)
    return cut(values, cuts_of(place))


def cuts_of(place: Any) -> list[tuple[int, int, int]]:
    """Return how a DTensor is cut: dimension, number of parts, this rank's. The last axis first."""
    axes, mesh = [*enumerate(place.placements)], place.device_mesh
    return [
        (p.dim, mesh.size(n), mesh.get_local_rank(n)) for n, p in axes[::-1] if hasattr(p, "dim")
    ]


def copies_of(place: Any) -> int:
    """Return how many ranks hold the same part of a DTensor as this one."""
    parts = torch.Size(parts for _, parts, _ in cuts_of(place)).numel()
    return torch.distributed.get_world_size() // parts


def ends_of(shape: Iterable[int], cuts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return where the part that `cuts_of` leads to begins and ends along each dimension."""
    ends = [(0, size) for size in shape]
    for dim, parts, index in cuts:
        low, high = ends[dim]
        rows = rows_of_a_part(high - low, parts)
        ends[dim] = min(low + rows * index, high), min(low + rows * (index + 1), high)
    return ends


def cut(values: Tensor, cuts: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return the view of whole values that `cuts_of` leads to."""
    return values[tuple(slice(low, high) for low, high in ends_of(values.shape, cuts))]


def shard_like(place: Any, part: Tensor) -> Tensor:
    """Wrap a rank's part of `place`, unless marked `whole`, as a tensor that shares its memory."""
    if not is_sharded(place) or part.shape != part_of(place).shape or hasattr(part, "whole"):
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": place.shape, "stride": place.stride(), "run_check": False}
    return DTensor.from_local(part, place.device_mesh, place.placements, **layout)


def rows_of_a_part(rows: int, ranks: int) -> int:
    """Return how many rows each rank holds. The last ranks may hold fewer."""
    return -(-rows // ranks)
