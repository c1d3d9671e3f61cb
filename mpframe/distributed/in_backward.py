"""Gradients that the ranks sum while the backward pass runs.

The gradients of the last layers are sent while those of the first are still computed. Each is taken
as soon as autograd has accumulated it: measured on this rank, to fp32, unscaled, sent. Large ones
are sent from where they are, small ones together. Or they stay scaled and go in half: fewer bytes,
and more rounding.

All ranks send in one order, that of the parameters from the last to the first, whatever the order
in which they come. What a rank did not use is known at the end of its backward pass, and is zero
there. torch's DistributedDataParallel would send as early, but the model must be called as a whole
for it, and all of its layers used in each step.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpframe.distributed.pieces import pieces
from mpframe.errors import ConfigError
from mpframe.tree import HALF

if TYPE_CHECKING:
    from mpframe.distributed.process_group import ProcessGroup


@dataclass
class _Bucket:
    """Parameters whose gradients are sent together, and what has come of them."""

    parameters: list[Tensor]
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None  # what was sent
    work: Any = None


class InBackward:
    """Sums the gradients of some parameters over the ranks.

    Args:
        world: of these ranks.
        half: the format to send gradients in; None: fp32, or wider where they are.
    """

    def __init__(self, world: "ProcessGroup", half: torch.dtype | None) -> None:
        self._world, self._half = world, half
        self._trained: list[Tensor] = []
        self._pieces: list[list[Tensor]] = []
        self._layout: dict[Tensor, tuple[int, ...]] = {}
        self._home: dict[Tensor, _Bucket] = {}
        self._taken: set[Tensor] = set()
        self._unsent: list[_Bucket] = []  # the next one to send is the last
        self._sent: list[_Bucket] = []
        self._amaxes: list[Tensor] = []
        self._scale: Tensor | None = None

    @contextmanager
    def summing(self, trained: Sequence[Tensor], scale: Tensor | None) -> Iterator[None]:
        """Within the block a backward pass sends its gradients.

        Args:
            trained: the parameters, without gradients, in one order on all ranks.
            scale: what the loss is multiplied by, > 0; None: it is not scaled, and nobody asks how
                large the gradients of one rank are.
        """
        self._begin(trained, scale)
        # Anew in each step, so that they come last: other hooks want to see the gradient.
        hooks = [
            own.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            for own in self._trained
        ]
        try:
            yield
        except BaseException:
            self._home, self._unsent, self._sent = {}, [], []
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def sums(self, loss: Tensor) -> tuple[dict[Tensor, Tensor], Tensor | None, Tensor]:
        """The gradients after that block; the parameters are left without.

        Args:
            loss: 0-d, of this rank.

        Returns:
            By parameter: their sums over the ranks, fp32 or wider, unscaled; one that no rank used
            is left out. The largest unscaled magnitude on any rank before, 0-d fp32, inf if one is
            inf or nan; None if the loss is not scaled. The mean loss.

        Raises:
            LostRankError: a rank does not answer.
        """
        world = self._world
        used = torch.tensor([own in self._taken for own in self._trained], dtype=torch.int64)
        told = world.start(used, dist.ReduceOp.MAX, on_host=True)
        if self._unsent:  # Else this rank has used all of them, and need not be told.
            world.wait(told)
            self._send_rest({p for p, by_one in zip(self._trained, used, strict=True) if by_one})
        total, amax = loss.clone(), self._amax()
        started = [told, world.start(total)]
        if amax is not None:
            amax, of_amax = world.start_max(amax)
            started.append(of_amax)
        sums = self._receive()
        for own in started:
            world.wait(own)
        return sums, amax, total / world.size

    def _begin(self, trained: Sequence[Tensor], scale: Tensor | None) -> None:
        if [*map(id, trained)] != [*map(id, self._trained)]:  # Some are frozen for a while.
            self._trained = list(trained)
            self._pieces = [*_pieces(self._trained[::-1])]
            self._layout = {p: torch.empty_like(p, device="meta").stride() for p in self._trained}
        self._unsent = [_Bucket(piece) for piece in reversed(self._pieces)]
        self._home = {own: bucket for bucket in self._unsent for own in bucket.parameters}
        self._sent, self._amaxes, self._scale = [], [], scale
        self._taken = set()

    def _take(self, parameter: Tensor) -> None:
        """Autograd has accumulated the gradient of a parameter."""
        bucket = self._home[parameter]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise ConfigError(
                "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the "
                "layer with sparse=False"
            )
        if parameter in self._taken:
            raise ConfigError(
                f"trainer.reduce=in_backward: the weight of {list(parameter.shape)} got a second "
                "gradient in one backward pass, as by checkpoint(use_reentrant=True); use "
                "use_reentrant=False, or trainer.reduce=after_backward"
            )
        self._taken.add(parameter)
        bucket.gradients[parameter] = gradient
        while self._unsent and len(self._unsent[-1].gradients) == len(self._unsent[-1].parameters):
            self._send(self._unsent.pop())

    def _send_rest(self, used: Collection[Tensor]) -> None:
        """Send the buckets that are not full; zeros for what other ranks used alone."""
        while self._unsent:
            bucket = self._unsent.pop()
            for own in bucket.parameters:
                if own in used and own not in bucket.gradients:
                    bucket.gradients[own] = torch.zeros_like(own)
            bucket.parameters = [own for own in bucket.parameters if own in bucket.gradients]
            if bucket.parameters:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """Send a bucket, and do not wait for its sums."""
        flat = _flat([self._in_memory_order(own, bucket) for own in bucket.parameters])
        if self._half is not None:
            flat = flat.to(self._half)  # What is too large for it becomes inf: an overflow.
        elif flat.dtype in HALF:
            flat = flat.float()
        if self._scale is not None:
            if self._half is None:
                flat.div_(self._scale)
            self._amaxes.append(_amax(flat))
        if self._half is not None:
            flat.div_(self._world.size)  # So that no sum is too large.
        bucket.gradients, bucket.flat = {}, flat
        bucket.work = self._world.start(flat)
        self._sent.append(bucket)

    def _amax(self) -> Tensor | None:
        """The largest unscaled magnitude of what was sent; None: nobody asks."""
        if self._scale is None:
            return None
        amax = torch.stack([*self._amaxes, torch.zeros_like(self._scale)]).max()
        return amax if self._half is None else amax / self._scale

    @torch.no_grad()
    def _receive(self) -> dict[Tensor, Tensor]:
        """All sums, by parameter and in their order."""
        sums: dict[Tensor, Tensor] = {}
        while self._sent:
            sums |= self._received(self._sent.pop(0))
        self._home = {}
        return {own: sums[own] for own in self._trained if own in sums}

    def _received(self, bucket: _Bucket) -> dict[Tensor, Tensor]:
        self._world.wait(bucket.work)
        flat: Any = bucket.flat
        if self._half is not None:
            wide = torch.promote_types(bucket.parameters[0].dtype, torch.float32)
            flat = flat.to(wide).mul_(self._world.size)
            if self._scale is not None:
                flat.div_(self._scale)
        parts = flat.split([own.numel() for own in bucket.parameters])
        return {
            own: part.as_strided(own.size(), self._layout[own], part.storage_offset())
            for own, part in zip(bucket.parameters, parts, strict=True)
        }

    def _in_memory_order(self, parameter: Tensor, bucket: _Bucket) -> Tensor:
        """The gradient of a parameter in the order in which their values lie in memory, 1-d."""
        gradient = bucket.gradients[parameter]
        if gradient.stride() != self._layout[parameter]:
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What is sent together, in one format; half gradients go in fp32."""
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for own in parameters:
        by_format.setdefault(torch.promote_types(own.dtype, torch.float32), []).append(own)
    for alike in by_format.values():
        yield from pieces(alike)


def _flat(values: Sequence[Tensor]) -> Tensor:
    """One tensor of all values; of a single one that is itself."""
    return values[0] if len(values) == 1 else torch.cat(list(values))


def _amax(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.zeros((), device=values.device)
    return torch.stack(torch.aminmax(values)).abs().max().float()
