"""BatchNorm with the statistics of the whole batch, of which each rank has a part.

    mean = sum_r sum x / n,    var = sum_r sum (x - mean)^2 / n      over all ranks r, n values

torch's own SyncBatchNorm computes only on GPUs. Here the sums go over the ranks by an all-reduce
that the backward pass goes through, so the gradient is as with one process. The deviation is
from the common mean, which loses no digits. The step weighs each rank's gradients after the
backward pass, so what comes here from rank s for rank r counts w_s / w_r.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpframe.core.comm import Comm, apply_weight


class _Step:
    """The present step: whether a layer ran forward, and this rank's weight in its backward."""

    ran, weight = False, torch.ones(())


def note_weight(comm: Comm, count: Tensor) -> None:
    """Note, if a layer ran, what the step will weigh this rank's gradients by."""
    if _Step.ran:
        _Step.ran, _Step.weight = False, comm.weight(count)


def synchronize(model: nn.Module) -> None:
    """Make every BatchNorm of a model use the statistics of all ranks in training, in place.

    Parameters, buffers and names stay. In training mode every rank must call the model, or none.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kind = type(module)
            module.__class__ = type(f"Sync{kind.__name__}", (_Sync, kind), {})


class _Sync(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        _Step.ran = True
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        values = input.float() if input.dtype.itemsize < 4 else input
        dims = [0, *range(2, values.dim())]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        own_count = values.numel() // values.shape[1]
        sums = _over_ranks(torch.cat([values.sum(dims), values.new_tensor([own_count])]))
        count = sums[-1].detach()
        # Only a rank with so few values reads their sum, for which the host waits for the device.
        if own_count < 2 and count < 2:
            size = torch.Size([int(count), *input.shape[1:]])
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {size}"
            )
        centered = values - (sums[:-1] / count).view(shape)
        variance = _over_ranks((centered * centered).sum(dims)) / count
        self._track(sums[:-1].detach() / count, variance.detach() * count / (count - 1))
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        plain = self.weight is None
        return normal if plain else normal * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight: Any = self.momentum
        if weight is None:  # The mean over all batches.
            weight = 1.0 / self.num_batches_tracked.to(mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks. Each rank's part gets the weighed sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        weight = _Step.weight.to(gradient.device)
        return _over_ranks(apply_weight(gradient, weight)) / weight


_over_ranks: Callable[[Tensor], Tensor] = _AllReduce.apply
