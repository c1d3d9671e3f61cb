"""Gradients that are averaged while the backward pass runs, by torch's DistributedDataParallel.

It gathers the gradients in buckets and hands each over as soon as it is full, so those of the last
layers are sent while those of the first are still computed. They go as they do after the backward
pass: measured on each rank, to fp32, unscaled, summed. Or they stay scaled and go in half: fewer
bytes, and more rounding.

Each layer must be used in every step, by a call of the model itself; what is not would stay as it
is on each rank, and is refused.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from mpframe.errors import ConfigError
from mpframe.tree import HALF


class InBackward:
    """A model for the ranks to train together.

    Args:
        model: on its device; the same on all ranks.
        half: the format to send gradients in; None: fp32, or wider where they are.
        answered: within it other ranks must answer.
    """

    def __init__(
        self,
        model: nn.Module,
        half: torch.dtype | None,
        answered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._half, self._answered = model, half, answered
        self._trained: list[int] = []
        self._parallel: _Parallel | None = None
        self._scale: Tensor | float = 1.0
        self._sent: list[tuple[GradBucket, Tensor, Any]] = []  # with its sums, and their work
        self._amaxes: list[Tensor] = []

    def model(self, scale: Tensor | float) -> nn.Module:
        """What is to be called in the place of the model in this step.

        Args:
            scale: what the loss will be multiplied by, > 0.
        """
        trained = [id(own) for own in self._model.parameters() if own.requires_grad]
        if self._parallel is None or trained != self._trained:  # Some are frozen for a while.
            self._parallel, self._trained = _Parallel(self._model, self._send), trained
        self._parallel.called, self._scale = False, scale
        self._sent, self._amaxes = [], []
        return self._parallel

    def sums(self) -> tuple[dict[Tensor, Tensor], Tensor]:
        """The gradients after the backward pass; the parameters are left without.

        Returns:
            By parameter: their sums over the ranks, fp32 or wider, unscaled; and the largest
            unscaled magnitude on this rank, 0-d fp32, inf or nan if any is.

        Raises:
            ConfigError: the model was not called, or a parameter was not used.
            LostRankError: a rank does not answer.
        """
        self._refuse_unused()
        sums: dict[Tensor, Tensor] = {}
        sent, self._sent = self._sent, []
        for bucket, flat, work in sent:
            with self._answered():
                work.wait()
            if self._half is not None:
                own = bucket.buffer()
                flat = flat.float() if own.dtype in HALF else own.copy_(flat)
                flat.mul_(dist.get_world_size() / self._scale)
            for parameter in bucket.parameters():
                place: Any = parameter.grad  # A view of the bucket, which is laid out as `flat`.
                where = place.size(), place.stride(), place.storage_offset()
                sums[parameter], parameter.grad = flat.as_strided(*where), None
        return sums, torch.stack(self._amaxes).max()

    @torch.no_grad()
    def _send(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket, and do not wait for its sums: DDP leaves what is in it."""
        own = bucket.buffer()
        if own.is_sparse:
            raise ConfigError(
                "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the "
                "layer with sparse=False"
            )
        if self._half is None:
            flat = own.float() if own.dtype in HALF else own
            flat = flat.div_(self._scale) if isinstance(self._scale, Tensor) else flat
            self._amaxes.append(_amax(flat))
        else:
            flat = own.to(self._half)  # What is too large for it becomes inf: an overflow.
            self._amaxes.append(_amax(flat) / self._scale)
            flat.div_(dist.get_world_size())  # So that no sum is too large.
        self._sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(own)
        return done

    def _refuse_unused(self) -> None:
        way_out = "use trainer.reduce=after_backward"
        if self._parallel is not None and not self._parallel.called:
            raise ConfigError(
                "trainer.reduce=in_backward: the objective does not call the model, but a part of "
                f"it; {way_out}"
            )
        for name, own in self._model.named_parameters():
            if own.requires_grad and own.grad is None:
                raise ConfigError(
                    f"trainer.reduce=in_backward: {name} was not used in this step; {way_out}, or "
                    "freeze it"
                )


def _amax(values: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(values)).abs().max().float()


class _Parallel(DistributedDataParallel):
    """The model's attributes are its own, too: an objective may read them."""

    called = False

    def __init__(self, model: nn.Module, send: Callable[..., Any]) -> None:
        # Ranks begin with the same weights, and the trainer keeps the buffers the same.
        with warnings.catch_warnings():
            # Its successor does not exist before torch 2.15.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                model, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
            )
        self.register_comm_hook(None, send)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.called = True
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
