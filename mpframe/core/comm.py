"""The processes of a run, and all that they agree on. `Comm` itself is a single process.

Whoever takes part in a step calls these methods on every rank, in the same order, and has one code
path for one process and for many.

The functions on parts are for tensors of which each rank holds some rows, as torch's DTensor.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Comm:
    """One process alone: it agrees with itself, at no cost.

    Attributes:
        rank: this process's number, 0 to size - 1.
        size: how many processes there are.
        sharding: divides the model's weights among them; None: each process has all.
    """

    rank = 0
    size = 1
    sharding: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes the run's folder."""
        return self.rank == 0

    def part(self, samples: Tensor) -> Tensor:
        """This rank's share of a global batch [N]: contiguous, sizes that differ by at most 1."""
        if self.size == 1:
            return samples
        count = len(samples)
        return samples[count * self.rank // self.size : count * (self.rank + 1) // self.size]

    def max(self, magnitude: Tensor) -> Tensor:
        """The largest of all ranks' values >= 0, each by itself, on the device.

        inf where one is inf or nan.
        """
        return magnitude

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, on the device."""
        return value

    def weight(self, count: Tensor) -> Tensor:
        """This rank's count, 0-d float64, over the mean of all; exactly 1 where they are equal."""
        return (count / self.mean(count)).float()

    def norm(self, of_part: Tensor) -> Tensor:
        """The 2-norm of what all ranks hold, each a part with this norm; 0-d, on the device."""
        return of_part

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks in place; bit for bit the same on all of them."""

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give each tensor the values it has on rank 0, in place."""

    def start_broadcast_(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin what `broadcast_` does; the call of what is returned ends it."""
        return lambda: None

    def max_of(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers at each place, on the host."""
        return list(numbers)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank, on the host."""
        return flag

    def gather_object(self, value: T) -> list[T]:
        """On rank 0 the values of all ranks in their order; an empty list on the others."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """The value that rank 0 has."""
        return value

    def lend(self, value: T | None) -> T | None:
        """The value; if weights are divided, a rank without one gets that of another rank."""
        return value

    def barrier(self) -> None:
        """Wait until every rank has come here."""

    def synchronize_batchnorm(self, model: nn.Module) -> None:
        """Let BatchNorm use the statistics of all ranks, in place."""

    def backward(
        self, loss: Tensor, scale: Tensor, count: Tensor | int, inputs: Sequence[Tensor] | None
    ) -> None:
        """Run the backward pass of loss * scale.

        Args:
            loss: 0-d.
            scale: 0-d fp32.
            count: how many samples the loss is the mean of; divided weights are summed by it.
            inputs: the parameters that get gradients; None: all.
        """
        loss.backward(scale.clone(), inputs=inputs)  # type: ignore[no-untyped-call]

    def in_backward(self) -> Any:
        """What sums gradients while a backward pass runs; None if it has no such thing."""
        return None

    def shard(
        self, model: nn.Module, formats: Mapping[nn.Parameter, torch.dtype], device: torch.device
    ) -> dict[Tensor, Tensor]:
        """Divide a model's weights among the ranks, in place; see `Sharding`.

        Returns:
            The parameters as they were, each with the one in its place.
        """
        return {}

    def refuse_lost(self, error: BaseException | None) -> None:
        """Raise LostRankError if an error in a model, which may send, says that a rank is lost."""

    def publish(self, error: str) -> None:
        """Tell the other ranks why this one ends, so that they can say it."""


SINGLE_PROCESS = Comm()


def weighted(value: Tensor, weight: Tensor) -> Tensor:
    """value * weight; 0 where the weight is 0, for a mean over nothing is nan."""
    return torch.where(weight == 0, 0.0, value * weight)


def weigh_(values: list[Tensor], weight: Tensor) -> None:
    """The same in place, for many values and one weight, 0-d fp32."""
    if weight.is_cpu and weight == 1:  # Asking a CPU costs nothing, and these are all gradients.
        return
    torch._foreach_mul_(values, weight)
    for value in values:
        value.masked_fill_(weight == 0, 0.0)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    kind: Any = sys.modules.get("torch.distributed.tensor")  # Without it there is none.
    return kind is not None and isinstance(tensor, kind.DTensor)


def part_of(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the memory they have; of any other tensor all."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    own: Tensor = sharded.to_local()
    return own


def part_for(place: Tensor, values: Tensor) -> Tensor:
    """The rows of `values` that belong into the memory of `place`.

    Args:
        place: sharded or not.
        values: of its shape; whole, or sharded as `place` is.
    """
    if is_sharded(values) or not is_sharded(place):
        return part_of(values)
    mesh = as_any(place).device_mesh
    rows = rows_of_a_part(len(values), mesh.size())
    return values[rows * mesh.get_local_rank() :][:rows]


def sharded_as(place: Tensor, part: Tensor) -> Tensor:
    """A part as a tensor sharded in the way of `place`, sharing its memory."""
    if not is_sharded(place):
        return part
    from torch.distributed.tensor import DTensor

    like = as_any(place)
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=place.shape,
        stride=place.stride(),
    )


def address_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins: the same for one that several names share; 0: nowhere."""
    if is_sharded(tensor):  # The memory of an empty part is there, too.
        return part_of(tensor).untyped_storage().data_ptr()
    return tensor.data_ptr()


def rows_of_a_part(rows: int, ranks: int) -> int:
    """How many rows a rank holds, but for the last ones."""
    return -(-rows // ranks)


def as_any(tensor: Tensor) -> Any:
    """The tensor, whose class torch's types do not know."""
    return tensor
