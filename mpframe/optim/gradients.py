"""From scaled half gradients to what the optimizer may use: fp32, unscaled, measured.

The order is fixed. They are first cast to fp32 and then unscaled: 2^-14 / 2^14 is 0 in half and
exact in fp32. Then they are measured, before anything is clipped:

    amax = max |g|         inf or nan says that the step overflowed
    norm = sqrt(sum g^2)   over all parameters
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.distributed.world import World
from mpframe.errors import ConfigError
from mpframe.tree import HALF


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a step or a micro-batch: fp32 (or wider), unscaled, sparse ones coalesced.

    Attributes:
        by_master: what the optimizer is given.
        values: their dense values, sharing memory with them; empty ones are left out.
        sparse: the masters whose gradient is sparse.
        amax: 0-d float32, the largest magnitude; inf or nan if any is; 0 if there is none.
    """

    by_master: dict[Tensor, Tensor]
    values: list[Tensor]
    sparse: list[Tensor]
    amax: Tensor


def unscaled(
    scaled: Iterable[tuple[Tensor, Tensor]], scale: Tensor | float, device: torch.device
) -> Gradients:
    """Gradients as an optimizer may use them; fp32 ones are unscaled in place.

    Args:
        scaled: (master, gradient as the backward pass left it).
        scale: what the loss was multiplied by: 0-d float32 or a number, > 0. A power of two takes
            no bit from an fp32 gradient.
        device: where all of them are.
    """
    by_master: dict[Tensor, Tensor] = {}
    values, sparse = [], []
    for master, gradient in scaled:
        dense = wide = gradient.float() if gradient.dtype in HALF else gradient
        if wide.is_sparse:
            # Coalesced in fp32: in half the sum of duplicates could overflow.
            wide = wide.coalesce()
            dense = wide.values()
            sparse.append(master)
        by_master[master] = wide
        if dense.numel():
            values.append(dense)
    if values and (isinstance(scale, Tensor) or scale != 1.0):
        torch._foreach_div_(values, torch.as_tensor(scale, device=device))
    return Gradients(by_master, values, sparse, _amax(values, device))


def agreed(gradients: Gradients, world: World) -> Gradients:
    """The same with the largest amax of all ranks: what overflows on one overflows on all."""
    if world.size == 1:
        return gradients
    return replace(gradients, amax=world.max(gradients.amax))


def norm_of(values: list[Tensor], device: torch.device) -> Tensor:
    """The global 2-norm as 0-d fp32, by the rule of torch's clipping; 0 if there is no value."""
    if not values:
        return torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm.float()


def check_max_norm(max_norm: float) -> None:
    """Refuse a norm that gradients cannot be clipped to.

    Raises:
        ConfigError: it is not a finite number > 0.
    """
    if not 0.0 < max_norm < math.inf:
        raise ConfigError(
            f"max_norm={max_norm}: must be a finite number > 0; None leaves the gradients as "
            "they are"
        )


def clip(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale to a global norm of at most `max_norm`, in place; the rule of torch's clipping.

    coefficient = min(1, max_norm / (norm + 1e-6))
    """
    if values:
        torch._foreach_mul_(values, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def not_finite(magnitude: Tensor) -> Tensor:
    """True if a magnitude (>= 0, or nan) is inf or nan: the verdict, in two kernels."""
    return ~(magnitude < torch.inf)


def _amax(values: list[Tensor], device: torch.device) -> Tensor:
    if not values:
        return torch.zeros((), device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(values, torch.inf)).max().float()
    # On a CPU the infinity norm takes 9 to 20 times as long as finding both ends of the values.
    ends: list[Tensor] = []
    for value in values:
        ends += torch.aminmax(value)
    return torch.stack(ends).abs().max().float()
