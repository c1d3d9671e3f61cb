"""Gradients that the ranks average while the backward pass runs.

torch's DistributedDataParallel collects the gradients in buckets and reports full ones. Here a
bucket is, in fp32, unscaled, measured, weighed by this rank's count and summed over the ranks. The
means stay beside the buckets, because half gradients could not hold them.

DDP wraps the loss, not the model. So a model may be called by parts, more than once, or compiled.
"""

from collections.abc import Sequence
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpframe.core.comm import apply_weight, weigh_
from mpframe.core.errors import ConfigError

# The last bucket is sent after all computing. Between two processes on a CPU this size took the
# least time. On an accelerator torch chooses.
_BUCKET_MB = 4

_SPARSE = (
    "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the layer with "
    "sparse=False"
)
_TWO = (
    "trainer.reduce=in_backward: a weight got a second gradient in one backward pass, as by "
    "checkpoint(use_reentrant=True); use use_reentrant=False, or trainer.reduce=after_backward"
)

Reduction = tuple[Tensor, dict[Tensor, Tensor], Any]
"""A bucket's gradients, 1-d, each parameter's part of them, the all-reduce under way."""


class DataParallel:
    """Averages the gradients of a loss over the ranks."""

    def __init__(self, comm: Any) -> None:  # the ProcessGroup that made it
        self._comm = comm
        # DDP itself sends nothing to other ranks: it knows only this rank's step.
        self._alone = dist.new_group([comm.rank], backend="gloo", use_local_synchronization=True)
        self._ddp: Any = None
        self._parameters: Sequence[Any] = ()
        self._leaves: list[Any] = []
        self._strides: dict[Any, tuple[int, ...]] = {}  # of gradients that lie as parameters do
        self._scale: Tensor | float = 1.0
        self._count = self._total = torch.ones(())
        self._weight: Tensor | None = None
        self._counting: Any = None
        self._reductions: list[Reduction] | None = None
        self._amaxes: list[Tensor] = []
        self._sent: dict[Any, int] = {}  # The version of each gradient.

    @property
    def weight(self) -> Tensor:
        """`Comm.weight` of the count, 0-d fp32, needed when the first bucket is full."""
        if self._weight is None:
            self._comm.wait(self._counting)
            self._counting = None
            self._weight = (self._count / (self._total / self._comm.size)).float()
        return self._weight

    def backward(
        self, loss: Tensor, scale: Tensor | float, count: Tensor, parameters: Sequence[Tensor]
    ) -> None:
        """Run the backward pass of loss * scale, and begin to average the gradients.

        ConfigError if a gradient is sparse, or a parameter got two.

        Args:
            loss: 0-d, the mean over `count` (0-d float64) samples.
            scale: 0-d fp32, > 0. The number 1: the loss is not scaled, and single ranks' amaxes
                are not measured.
            parameters: without gradients, in the same order on all ranks.
        """
        self._scale, self._count, self._total, self._weight = scale, count, count.clone(), None
        self._counting = self._comm.start(self._total)
        try:
            loss = self._wrap(loss, parameters)
            self._reductions, self._amaxes, self._sent = [], [], {}
            loss.backward(scale.clone() if isinstance(scale, Tensor) else None)  # type: ignore[no-untyped-call]
            self._complete()
        except BaseException as error:
            self._leaves = []  # DDP cannot go on in the middle of a pass.
            self._counting = self._reductions = None
            if any(p.grad is not None and p.grad.is_sparse for p in self._parameters):
                raise ConfigError(_SPARSE) from error
            if "to mark a variable ready only once" in str(error):
                raise ConfigError(_TWO) from error
            raise
        if any(p.grad._version != version for p, version in self._sent.items()):
            raise ConfigError(_TWO)

    @torch.no_grad()
    def means(self, loss: Tensor) -> tuple[dict[Tensor, Tensor], Tensor, Tensor | None, Tensor]:
        """Take the averaged gradients after `backward`, and this rank's 0-d loss.

        Returns:
            By parameter: their means over the ranks, fp32 or wider, unscaled, without parameters
            that no rank used. The largest magnitude among them, 0-d fp32, inf if one is inf or nan
            on any rank. The same for single ranks' gradients before they were weighed and summed,
            None if the loss is not scaled. The mean loss, weighed as they are.
        """
        comm, total, means = self._comm, apply_weight(loss, self.weight), dict[Tensor, Tensor]()
        used = torch.tensor([p in self._sent for p in self._parameters], dtype=torch.int64)
        asking, adding = comm.start(used, dist.ReduceOp.MAX, on_host=True), comm.start(total)
        amaxes = [torch.zeros((), device=loss.device)]
        for reduction in self._reductions or ():  # The next ones arrive meanwhile.
            amaxes.append(_amax(self._receive(reduction)))
            means |= reduction[1]
        self._reductions = None  # As long as anybody has them, the connections stay open.
        self._drop_gradients()
        comm.wait(asking)
        comm.wait(adding)
        means = {p: means[p] for p, by_any in zip(self._parameters, used, strict=True) if by_any}
        amax = torch.stack(amaxes).max()
        if not isinstance(self._scale, Tensor):
            return means, comm.max(amax), None, total / comm.size
        before = torch.stack([torch.zeros_like(amax), *self._amaxes]).max()
        before = torch.where(self.weight > 0, before, 0.0)  # With no weight nothing was sent.
        amax, before = comm.max(torch.stack([amax, before])).unbind()
        return means, amax, before, total / comm.size

    def _wrap(self, loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Wrap the loss, so that its backward pass fills DDP's buckets."""
        seen: Any = _Leaves.apply(*parameters)
        leaves = [leaf for leaf, _ in seen.grad_fn.next_functions]
        if leaves != self._leaves:  # One has changed: it was frozen, or had another dtype.
            self._parameters, self._leaves = parameters, leaves
            self._build(loss.device)
        return self._ddp(loss)  # type: ignore[no-any-return]

    def _build(self, device: torch.device) -> None:
        """Lay out buckets from the last parameter to the first, on all ranks and in all runs.

        DDP lays them out for good in one pass, by the order of the gradients. So a pass before the
        first one has them in this order.
        """
        loss = nn.Identity()
        loss.parameters_ = nn.ParameterList(self._parameters)
        self._ddp = DistributedDataParallel(
            loss,
            process_group=self._alone,
            init_sync=False,
            bucket_cap_mb=_BUCKET_MB if device.type == "cpu" else None,
            gradient_as_bucket_view=True,
        )
        # A proxy, because the garbage collector cannot look into DDP.
        self._ddp.register_comm_hook(proxy(self), DataParallel._reduce)
        # Others lie in rows, whatever their parameters do.
        self._strides = {
            p: p.stride()
            for p in self._parameters
            if p.stride() == torch.empty_like(p, device="meta").stride()
        }
        self._reductions = None
        self._ddp(torch.zeros((), device=device))
        self._complete()
        self._drop_gradients()

    def _complete(self) -> None:
        """Make DDP take zeros for the gradients that have not come."""
        missing = [n for n, p in enumerate(self._parameters) if p.grad is None]
        if missing:
            mark = self._ddp.reducer._autograd_hook  # It must be called in a backward pass.
            end = torch.zeros((), requires_grad=True)
            end.register_hook(lambda _: [*map(mark, reversed(missing))] and None)  # type: ignore[no-untyped-call]
            end.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Begin to sum a full bucket, which DDP gets back at once."""
        buffer = bucket.buffer()
        if self._reductions is not None:
            flat = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
            if isinstance(self._scale, Tensor):
                flat.div_(self._scale)
                self._amaxes.append(_amax(flat))
            weigh_([flat], self.weight)
            slots = {
                p: flat.as_strided(
                    p.size(), self._strides.get(p, rows.stride()), rows.storage_offset()
                )
                for p, rows in zip(bucket.parameters(), bucket.gradients(), strict=True)
            }
            self._reductions.append((flat, slots, self._comm.start(flat)))
            self._sent |= {p: p.grad._version for p in slots if p.grad is not None}
        given_back = torch.futures.Future[Tensor]()
        given_back.set_result(buffer)
        return given_back

    def _receive(self, reduction: Reduction) -> Tensor:
        flat, _, work = reduction
        self._comm.wait(work)
        return flat.div_(self._comm.size)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Leaves(torch.autograd.Function):
    """Leads to the graph's nodes that accumulate the gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0)


def _amax(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.zeros((), device=values.device)
    return torch.stack(torch.aminmax(values)).abs().max().float()
