"""From scaled half gradients to what the optimizer may use: fp32, unscaled, measured.

The order is fixed. First to fp32, then unscale: 2^-14 / 2^14 is 0 in half and exact in fp32. Then
measure, before anything is clipped:

    amax = max |g|         inf or nan says that the step overflowed
    norm = sqrt(sum g^2)   over all parameters

`values` below are the dense tensors of gradients; torch's multi-tensor kernels take them whole.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def to_fp32(gradient: Tensor) -> Tensor:
    """A gradient in fp32 or wider; a sparse one is also coalesced, after the widening.

    Summing the duplicates of a half sparse gradient could overflow where fp32 does not.
    """
    widened = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return widened.coalesce() if widened.is_sparse else widened


def values_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The dense values of each gradient, sharing its memory; empty ones are left out."""
    values = (gradient.values() if gradient.is_sparse else gradient for gradient in gradients)
    return [value for value in values if value.numel()]


def unscale(values: list[Tensor], scale: Tensor) -> None:
    """Divide each tensor by `scale` (0-d, fp32), in place. Exact for a power of two."""
    if values:
        torch._foreach_div_(values, scale.to(values[0].device))


def amax_of(values: list[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude as 0-d fp32: inf or nan where any is; 0 where there is no value."""
    if not values:
        return torch.zeros((), device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(values, torch.inf)).max().float()
    # On a CPU the infinity norm takes 9 to 20 times as long as finding both ends of the values.
    ends = [end for value in values for end in torch.aminmax(value)]
    return torch.stack(ends).abs().max().float()


def norm_of(values: list[Tensor], device: torch.device) -> Tensor:
    """The global 2-norm as 0-d fp32, by the rule of torch's clipping; 0 where there is no value."""
    if not values:
        return torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm.float()


def clip(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale to a global norm of at most `max_norm`, in place; the rule of torch's clipping.

    coefficient = min(1, max_norm / (norm + 1e-6))
    """
    if values:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(values, coefficient.to(values[0].device))
