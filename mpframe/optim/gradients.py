"""From scaled half gradients to what the optimizer may use: measured first, then fp32.

There are two passes over the half gradients. The first reads them as they lie, and makes no copy:

    amax = max |g| / scale         inf or nan says that the step overflowed
    norm = sqrt(sum g^2) / scale   over all parameters, summed in fp32

The second comes with the update, for a few parameters at a time: first to fp32, then times one
factor that unscales and clips. In half 2^-14 / 2^14 is 0; in fp32 it is exact.

fp32 gradients are unscaled, and clipped, in the memory they have. Half ones that are few all in all
become fp32 at once, for the two passes would cost more calls than they save memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpframe.distributed.world import World
from mpframe.errors import ConfigError
from mpframe.tree import HALF

_FEW = 2**20  # values: 4 MB in fp32


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a step or a micro-batch, sparse ones coalesced.

    Attributes:
        by_master: what is left of them: half ones as the backward pass left them, the others fp32
            (or wider) and unscaled.
        values: their dense values, sharing memory with them; empty ones are left out.
        half: those of them that are half.
        wide: the others.
        sparse: the masters whose gradient is sparse.
        scale: what the half ones are multiplied by, 0-d on their device; 1.0: nothing.
        amax: 0-d float32, the largest unscaled magnitude; inf or nan if any is; 0 if there is none.
        clip_factor: 0-d, what clipping multiplies the half ones by; None: nothing.
        count: how many samples the loss of a micro-batch is the mean of, >= 0; a tensor is 0-d.
        max_value: the largest magnitude that `take` leaves to any value; None: it leaves all.
    """

    by_master: dict[Tensor, Tensor]
    values: list[Tensor]
    half: list[Tensor]
    wide: list[Tensor]
    sparse: list[Tensor]
    scale: Tensor | float
    amax: Tensor
    clip_factor: Tensor | None = None
    count: Tensor | float = 1
    max_value: float | None = None

    def norm(self) -> Tensor:
        """The global 2-norm as 0-d fp32, by the rule of torch's clipping; 0 without a value."""
        norms = list(torch._foreach_norm(self.wide)) if self.wide else []
        if self.half:
            of_half = iter(_unscale(torch.stack(_norms_of_half(self.half)), self.scale).unbind())
            of_wide = iter(norms)
            # In their own order, so that the sum is rounded as it is in the other dtype modes.
            norms = [next(of_half if v.dtype in HALF else of_wide) for v in self.values]
        if not norms:
            return torch.zeros_like(self.amax)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm.float()

    def take(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """The gradients of some masters as the optimizer may use them; they are here no more."""
        for values in (self.values, self.half, self.wide):
            values.clear()  # So that nothing else holds what is used up here.
        taken, widened = [], []
        for master in masters:
            gradient = self.by_master.pop(master)
            if gradient.dtype in HALF:
                gradient = gradient.float()
                widened.append(gradient)
            taken.append(gradient)
        if widened and self.clip_factor is not None:
            # One product for both; if the scale is a power of two, it takes no bit.
            torch._foreach_mul_(widened, _unscale(self.clip_factor, self.scale))
        elif widened and isinstance(self.scale, Tensor):
            torch._foreach_div_(widened, self.scale)
        if taken and self.max_value is not None:
            values = [own._values() if own.is_sparse else own for own in taken]
            torch._foreach_clamp_min_(values, -self.max_value)
            torch._foreach_clamp_max_(values, self.max_value)
        return taken


def measured(
    scaled: Iterable[tuple[Tensor, Tensor]], scale: Tensor | float, device: torch.device
) -> Gradients:
    """The gradients with their amax; half ones are left as they are, fp32 ones are unscaled.

    Args:
        scaled: (master, gradient as the backward pass left it).
        scale: what the loss was multiplied by: 0-d float32 or a number, > 0. A power of two takes
            no bit from an fp32 gradient.
        device: where all of them are.
    """
    scaled = list(scaled)
    count = 0
    for _, gradient in scaled:
        count += gradient.numel()
    by_master: dict[Tensor, Tensor] = {}
    values: list[Tensor] = []
    half: list[Tensor] = []
    wide: list[Tensor] = []
    sparse: list[Tensor] = []
    for master, gradient in scaled:
        if gradient.dtype in HALF and (count <= _FEW or gradient.is_sparse):
            gradient = gradient.float()
        dense = gradient
        if gradient.is_sparse:
            # Coalesced in fp32: in half the sum of duplicates could overflow.
            gradient = gradient.coalesce()
            dense = gradient.values()
            sparse.append(master)
        by_master[master] = gradient
        if dense.numel():
            values.append(dense)
            (half if dense.dtype in HALF else wide).append(dense)
    if isinstance(scale, Tensor) or scale != 1.0:
        scale = torch.as_tensor(scale, device=device)
    if wide and isinstance(scale, Tensor):
        torch._foreach_div_(wide, scale)
    amax = _amax(half, wide, scale, device)
    return Gradients(by_master, values, half, wide, sparse, scale, amax)


def ready(by_master: dict[Tensor, Tensor], amax: Tensor) -> Gradients:
    """Gradients that are fp32 or wider, dense and unscaled, and whose amax is known."""
    values = [gradient for gradient in by_master.values() if gradient.numel()]
    return Gradients(by_master, values, [], list(values), [], 1.0, amax)


def agreed(gradients: Gradients, world: World) -> Gradients:
    """The same with the largest amax of all ranks: what overflows on one overflows on all."""
    if world.size == 1:
        return gradients
    return replace(gradients, amax=world.max(gradients.amax))


def before_the_sum(gradients: Gradients, world: World) -> Gradients:
    """Gradients that the backward pass has summed over ranks, with the amax from before.

    It is what had to fit into half. Sums that are not finite still count as an overflow.
    """
    if world.sharding is None:
        return gradients
    amax = world.sharding.take_amax(gradients.amax.device)
    amax = torch.where(gradients.amax < torch.inf, _unscale(amax, gradients.scale), torch.inf)
    return replace(gradients, amax=amax)


def as_count(count: Tensor | float, device: torch.device) -> Tensor:
    """A count as a 0-d float64 tensor; a number becomes one without waiting for the device."""
    if isinstance(count, Tensor):
        return count.detach().to(device, torch.float64)
    return torch.full((), count, dtype=torch.float64, device=device)


def check_clipping(**bounds: float | None) -> None:
    """Refuse what gradients cannot be clipped to; the bounds are named as messages call them.

    Raises:
        ConfigError: one is not a finite number > 0, or several are given.
    """
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    for name, bound in given.items():
        if not 0.0 < bound < math.inf:
            raise ConfigError(
                f"{name}={bound}: must be a finite number > 0; None leaves the gradients as "
                "they are"
            )
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: do not go together; give one of them")


def clip(gradients: Gradients, norm: Tensor, max_norm: float) -> Gradients:
    """Scale to a global norm of at most `max_norm`; the rule of torch's clipping.

    factor = min(1, max_norm / (norm + 1e-6))
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if gradients.wide:
        torch._foreach_mul_(gradients.wide, factor)
    return replace(gradients, clip_factor=factor)


def not_finite(magnitude: Tensor) -> Tensor:
    """True if a magnitude (>= 0, or nan) is inf or nan: the verdict, in two kernels."""
    return ~(magnitude < torch.inf)


def _amax(
    half: list[Tensor], wide: list[Tensor], scale: Tensor | float, device: torch.device
) -> Tensor:
    """The largest magnitude, 0-d float32; of several half formats they are compared in fp32."""
    found: list[Tensor] = []
    ends: list[Tensor]
    for values, divisor in ((half, scale), (wide, 1.0)):
        if not values:
            continue
        if values[0].is_cpu:
            # There the infinity norm takes 9 to 20 times as long as finding both ends.
            ends = []
            for value in values:
                ends += torch.aminmax(value)
        else:
            ends = list(torch._foreach_norm(values, torch.inf))
        largest = torch.stack(ends).abs().max().float()
        found.append(largest / divisor if isinstance(divisor, Tensor) else largest)
    if not found:
        return torch.zeros((), device=device)
    return found[0] if len(found) == 1 else torch.maximum(*found)


def _norms_of_half(values: list[Tensor]) -> list[Tensor]:
    """The norm of each, summed in fp32 and in the order in which fp32 values are summed."""
    if not values[0].is_cpu:
        return list(torch._foreach_norm(values, 2, torch.float32))
    # On a CPU a copy and its norm take no longer, and the norm of the copy is that of `amp`.
    return [torch.linalg.vector_norm(value.float()) for value in values]


def _unscale(value: Tensor, scale: Tensor | float) -> Tensor:
    return value / scale if isinstance(scale, Tensor) else value
