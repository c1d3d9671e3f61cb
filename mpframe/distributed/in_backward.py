"""Gradients that the ranks sum while the backward pass runs.

The gradients of the last layers are sent while those of the first are still computed: as soon as
autograd has accumulated all of a piece they are put together, in fp32, unscaled, measured on this
rank, sent. A large one is a piece by itself and sent from where it is.

All ranks send in one order, that of the parameters from the last to the first, whatever the order
in which they come. What a rank did not use is known at the end of its backward pass, and is zero
there. torch's DistributedDataParallel would send as early, but the model must be called as a whole
for it, and all of its layers used in each step.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpframe.distributed.pieces import pieces
from mpframe.distributed.world import weigh_, weighted
from mpframe.errors import ConfigError

if TYPE_CHECKING:
    from mpframe.distributed.process_group import ProcessGroup


class _Place(NamedTuple):
    """Where the gradient of a parameter lies in what is sent."""

    offset: int
    stride: tuple[int, ...]


class _Sent(NamedTuple):
    """A piece under way.

    Attributes:
        flat: 1-d, what is sent.
        slots: its part for each parameter that any rank has used; at least one.
        work: the sending.
    """

    flat: Tensor
    slots: dict[Tensor, Tensor]
    work: Any


class InBackward:
    """Sums the gradients of some parameters over the ranks.

    Args:
        world: of these ranks.
    """

    def __init__(self, world: "ProcessGroup") -> None:
        self._world = world
        self._weight, self._count, self._total = torch.ones(()), torch.ones(()), torch.ones(())
        self._work: Any = None
        self._trained: list[Tensor] = []
        self._pieces: list[list[Tensor]] = []
        self._places: dict[Tensor, _Place] = {}
        self._unsent: list[list[Tensor]] = []  # the next piece to send is the last
        self._sent: list[_Sent] = []
        self._amaxes: list[Tensor] = []
        self._scale: Tensor | float = 1.0

    def weigh(self, count: Tensor) -> None:
        """Start to find the weight of this rank's gradients, from the counts of all ranks.

        Args:
            count: 0-d float64, how many samples the loss is the mean of.
        """
        self._count, self._total = count, count.clone()
        self._work = self._world.start(self._total)

    @property
    def weight(self) -> Tensor:
        """`World.weight` of the count, 0-d fp32; waited for when the first gradients are sent."""
        if self._work is not None:
            self._world.wait(self._work)
            mean = self._total / self._world.size
            self._work, self._weight = None, (self._count / mean).float()
        return self._weight

    @contextmanager
    def summing(self, trained: Sequence[Tensor], scale: Tensor | float) -> Iterator[None]:
        """Within the block a backward pass sends its gradients.

        Args:
            trained: the parameters, without gradients, in one order on all ranks.
            scale: what the loss is multiplied by, > 0; a number: it is not scaled, and nobody asks
                how large the gradients of one rank are.
        """
        self._begin(trained, scale)
        # Anew in each step, so that they come last: other hooks want to see the gradient. One for
        # each piece, at the gradient that mostly comes last; one for each gradient takes longer.
        hooks = [
            piece[-1].register_post_accumulate_grad_hook(self._send_full)  # type: ignore[no-untyped-call]
            for piece in self._pieces
        ]
        try:
            yield
        except BaseException:
            self._unsent, self._sent = [], []
            raise
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def means(self, loss: Tensor) -> tuple[dict[Tensor, Tensor], Tensor, Tensor | None, Tensor]:
        """The gradients after that block; the parameters are left without.

        Args:
            loss: 0-d, of this rank.

        Returns:
            By parameter: their means over the ranks, fp32 or wider, unscaled; one that no rank used
            is left out. The largest magnitude among them, 0-d fp32, inf if one is inf or nan on
            any rank. The same of the gradients of single ranks before they were weighed and summed;
            None if the loss is not scaled. The mean loss, weighed as they are.

        Raises:
            LostRankError: a rank does not answer.
        """
        world = self._world
        self._send_full()
        unsent = {own for piece in self._unsent for own in piece if own.grad is None}
        used = torch.tensor([own not in unsent for own in self._trained], dtype=torch.int64)
        told = world.start(used, dist.ReduceOp.MAX, on_host=True)
        if self._unsent:  # Else this rank has used all of them, and need not be told.
            world.wait(told)
            self._send_rest({p for p, by_one in zip(self._trained, used, strict=True) if by_one})
        self._refuse_second()
        total = weighted(loss, self.weight)
        of_loss = world.start(total)
        means, amax = self._receive(loss.device)
        world.wait(told)
        world.wait(of_loss)
        if not isinstance(self._scale, Tensor):
            return means, world.max(amax), None, total / world.size
        amax, before = world.max(torch.stack([amax, self._amax_before(self._scale)])).unbind()
        return means, amax, before, total / world.size

    def _begin(self, trained: Sequence[Tensor], scale: Tensor | float) -> None:
        if [*map(id, trained)] != [*map(id, self._trained)]:  # Some are frozen for a while.
            self._trained = list(trained)
            self._pieces = [*_pieces(self._trained[::-1])]
            self._places = {own: place for piece in self._pieces for own, place in _laid_out(piece)}
        self._unsent = self._pieces[::-1]
        self._sent, self._amaxes, self._scale = [], [], scale

    @torch.no_grad()
    def _send_full(self, _: Tensor | None = None) -> None:
        """Send the pieces of which all gradients have come."""
        while self._unsent and all(own.grad is not None for own in self._unsent[-1]):
            self._send(self._unsent.pop())

    def _send_rest(self, used: AbstractSet[Tensor]) -> None:
        """Send the other pieces; zeros for what other ranks used alone."""
        while self._unsent:
            piece = self._unsent.pop()
            if not used.isdisjoint(piece):
                self._send(piece, used)

    def _send(self, piece: list[Tensor], used: AbstractSet[Tensor] | None = None) -> None:
        """Send the gradients of some parameters, and do not wait for their sums.

        Args:
            piece: the parameters; left without gradients.
            used: those that any rank has used; None: all of them.
        """
        gradients = [own.grad for own in piece]
        for own, gradient in zip(piece, gradients, strict=True):
            own.grad = None
            if gradient is not None and gradient.is_sparse:
                raise ConfigError(
                    "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make "
                    "the layer with sparse=False"
                )
        flat, slots = self._laid_together(piece, gradients)
        if isinstance(self._scale, Tensor):
            flat.div_(self._scale)
            self._amaxes.append(_amax(flat))
        weigh_([flat], self.weight)
        if used is not None:
            slots = {own: slot for own, slot in slots.items() if own in used}
        self._sent.append(_Sent(flat, slots, self._world.start(flat)))

    def _laid_together(
        self, piece: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """The gradients as they are sent: 1-d, and by parameter."""
        format = _wide(piece[0])
        if len(piece) == 1 and self._is_laid_out(gradients[0], piece[0], format):
            only: Any = gradients[0]  # It is sent from where it is.
            return only.as_strided((only.numel(),), (1,), only.storage_offset()), {piece[0]: only}
        flat = torch.empty(sum(own.numel() for own in piece), dtype=format, device=piece[0].device)
        slots = {own: _part(flat, own, *self._places[own]) for own in piece}
        for slot, gradient in zip(slots.values(), gradients, strict=True):
            slot.zero_() if gradient is None else slot.copy_(gradient)
        return flat, slots

    def _is_laid_out(self, own: Tensor | None, parameter: Tensor, format: torch.dtype) -> bool:
        stride = self._places[parameter].stride
        return own is not None and own.dtype == format and own.stride() == stride

    def _refuse_second(self) -> None:
        """Raise ConfigError if a gradient came when that of the same parameter had been sent."""
        for own in self._trained:
            if own.grad is not None:
                raise ConfigError(
                    f"trainer.reduce=in_backward: the weight of {list(own.shape)} got a second "
                    "gradient in one backward pass, as by checkpoint(use_reentrant=True); use "
                    "use_reentrant=False, or trainer.reduce=after_backward"
                )

    def _amax_before(self, scale: Tensor) -> Tensor:
        """The largest unscaled magnitude of what was sent, 0-d fp32."""
        amax = torch.stack([*self._amaxes, torch.zeros_like(scale)]).max()
        return torch.where(self.weight > 0, amax, 0.0)  # What counts for nothing was not sent.

    def _receive(self, device: torch.device) -> tuple[dict[Tensor, Tensor], Tensor]:
        """All means, by parameter and in their order, and the largest magnitude among them."""
        means: dict[Tensor, Tensor] = {}
        amaxes = [torch.zeros((), device=device)]
        while self._sent:  # The next ones arrive meanwhile.
            flat, slots = self._received(self._sent.pop(0))
            amaxes.append(_amax(flat))
            means |= slots
        return {own: means[own] for own in self._trained if own in means}, torch.stack(amaxes).max()

    def _received(self, sent: _Sent) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """The means of a piece: 1-d, and by parameter."""
        self._world.wait(sent.work)
        return sent.flat.div_(self._world.size), sent.slots


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What is sent together, in one format; half gradients go in fp32."""
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for own in parameters:
        by_format.setdefault(_wide(own), []).append(own)
    for alike in by_format.values():
        yield from pieces(alike)


def _wide(parameter: Tensor) -> torch.dtype:
    """fp32, or the format of the parameter if that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _laid_out(piece: Sequence[Tensor]) -> Iterator[tuple[Tensor, _Place]]:
    """One after the other, each in the order in which its values lie in memory."""
    offset = 0
    for own in piece:
        yield own, _Place(offset, torch.empty_like(own, device="meta").stride())
        offset += own.numel()


def _part(flat: Tensor, parameter: Tensor, offset: int, stride: tuple[int, ...]) -> Tensor:
    return flat.as_strided(parameter.size(), stride, flat.storage_offset() + offset)


def _amax(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.zeros((), device=values.device)
    return torch.stack(torch.aminmax(values)).abs().max().float()
