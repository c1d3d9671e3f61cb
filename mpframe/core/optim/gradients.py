"""From scaled half gradients to fp32 ones: measured in place, then widened, then unscaled.

    amax = max |g| / scale         inf or nan if the step overflowed
    norm = sqrt(sum g^2) / scale   over all parameters, summed in fp32

Both are read without a copy. The update widens half gradients a few parameters at a time: first to
fp32, then times one factor that unscales and clips. In half 2^-14 / 2^14 is 0, in fp32 it is exact.
On a CPU a few half gradients become fp32 at once. fp32 ones are changed in place.

The gradients of several micro-batches are summed in fp32 and averaged over the good ones,

    g = sum_i n_i g_i / sum_i n_i      over the micro-batches i whose gradients are finite

if the loss of micro-batch i is the mean of n_i samples. So a window equals one large batch, however
it is cut. A bad micro-batch adds zeros, and the verdict on it stays on the device.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mpframe.core.comm import Comm, weigh_
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import POSITIVE, require
from mpframe.core.tree import HALF, is_apple, not_finite, to_fp32, widest

_FEW = 2**20  # values: 4 MB in fp32
# values: 16 MB of fp32 gradients fit in a CPU's cache. On an accelerator launches count more.
_SIZE_ON_CPU = 2**22
_SIZE = 2**26


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients of a micro-batch or a step, sparse ones coalesced, until they are popped."""

    by_master: dict[Tensor, Tensor]  # Half gradients are still scaled, the others are not.
    values: list[Tensor]  # their dense values in the same memory, without empty ones
    half: list[Tensor]  # the float16 and bfloat16 tensors in `values`
    wide: list[Tensor]  # the others
    scale: Tensor | float  # Half ones will be divided by it; 1.0 if they are not scaled.
    amax: Tensor  # 0-d float32, the largest unscaled magnitude, inf or nan if any is
    measured: Tensor | None  # `amax` as long as it follows from the values and nothing else
    count: Tensor | float = 1  # how many samples the loss is the mean of, >= 0
    known_norm: Tensor | None = None  # what `norm` returns, if it was measured with `amax`
    clip_factor: Tensor | None = None  # 0-d, half ones will be multiplied by it
    max_value: float | None = None  # Each value will be clamped to this magnitude.
    # 0-d float32, the amax for the scaler if it is another: the largest of any micro-batch, because
    # each has its own backward pass in half.
    scaler_amax: Tensor | None = None
    dropped: Tensor | None = None  # 0-d int64, micro-batches left out of a window of several
    no_new: bool = False  # The previous step has consumed the gradients, and none has come since.

    def norm(self, copies: Mapping[Tensor, int] | None = None) -> Tensor:
        """Return the global 2-norm, 0-d fp32, as torch's clipping does. `copies` count as one."""
        if self.known_norm is not None and not copies:
            return self.known_norm
        if not self.values:
            return torch.zeros_like(self.amax)
        norms = list(torch._foreach_norm(self.wide)) if self.wide else []
        if self.half:
            if self.half[0].is_cpu:
                # A copy and its norm take no longer here, and the norm is the one of `amp` mode.
                scaled = [torch.linalg.vector_norm(value.float()) for value in self.half]
            else:
                scaled = list(torch._foreach_norm(self.half, 2, torch.float32))
            if isinstance(self.scale, Tensor):
                torch._foreach_div_(scaled, self.scale)
            of_half, of_wide = iter(scaled), iter(norms)
            # In one order, so that the sum is rounded as it is in the other dtype modes.
            norms = [next(of_half if v.dtype in HALF else of_wide) for v in self.values]
        stacked = torch.stack(norms)
        if copies:
            counts = [copies.get(m, 1) for m, grad in self.by_master.items() if grad.numel()]
            stacked = stacked / stacked.new_tensor(counts).sqrt()
        norm: Tensor = torch.linalg.vector_norm(stacked)
        return norm.float()

    def clip(self, norm: Tensor, max_norm: float) -> Tensor:
        """Multiply by min(1, max_norm / (norm + 1e-6)), the rule of torch's clipping.

        Return 1 if the gradients or their norm are not finite, else 0: 0-d fp32. A norm beyond
        fp32 would clip every gradient to zero.
        """
        inverse = torch.reciprocal(norm + 1e-6)  # What max_norm / (norm + 1e-6) is made of.
        self.clip_factor = torch.clamp(inverse if max_norm == 1 else max_norm * inverse, max=1.0)
        local = self.amax is self.measured  # It follows from these gradients.
        if local and self.wide and not self.half and not is_apple(norm.device):
            found_inf = torch.ge(norm, torch.inf, out=torch.empty_like(norm))
            # One kernel multiplies them, and finds inf and nan.
            torch._amp_foreach_non_finite_check_and_unscale_(self.wide, found_inf, self.clip_factor)
            return found_inf
        if self.wide:
            torch._foreach_mul_(self.wide, self.clip_factor)
        largest = norm if local else torch.maximum(self.amax, norm)
        return torch.logical_not(largest < torch.inf, out=torch.empty_like(norm))

    def pop_fp32(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """Pop the gradients of these masters as unscaled, clipped fp32 tensors."""
        for views in (self.values, self.half, self.wide):
            views.clear()  # Or they would keep the popped gradients' memory.
        popped, half, widened = [], [], []
        for master in masters:
            gradient = self.by_master.pop(master)
            if gradient.dtype in HALF:
                half.append(gradient)
                gradient = torch.empty_like(gradient, dtype=torch.float32)
                widened.append(gradient)
            popped.append(gradient)
        if half:
            torch._foreach_copy_(widened, half)
        if widened and self.clip_factor is not None:
            # With a scale that is a power of two, unscaling loses no bit.
            scaled = isinstance(self.scale, Tensor)
            factor = self.clip_factor / self.scale if scaled else self.clip_factor
            torch._foreach_mul_(widened, factor)
        elif widened and isinstance(self.scale, Tensor):
            torch._foreach_div_(widened, self.scale)
        if popped and self.max_value is not None:
            dense = [grad._values() if grad.is_sparse else grad for grad in popped]
            torch._foreach_clamp_min_(dense, -self.max_value)
            torch._foreach_clamp_max_(dense, self.max_value)
        return popped


def measure_grads(
    scaled: Mapping[Tensor, Tensor],
    scale: Tensor | float,
    device: torch.device,
    amax: Tensor | None = None,
    with_norm: bool = False,
) -> Gradients:
    """Return gradients, by master, with their amax, and unscale fp32 ones in place.

    `with_norm` measures their norm as well, if that is cheaper now: of unscaled fp32 ones.
    """
    few = device.type == "cpu" and sum(map(Tensor.numel, scaled.values())) <= _FEW
    by_master = dict[Tensor, Tensor]()
    values, half, wide = list[Tensor](), list[Tensor](), list[Tensor]()
    for master, gradient in scaled.items():
        if gradient.dtype in HALF and (few or gradient.is_sparse):
            gradient = gradient.float()
        if gradient.is_sparse:  # Coalesced in fp32: in half the sum of duplicates could overflow.
            gradient = gradient.coalesce()
        by_master[master] = gradient
        value = gradient.values() if gradient.is_sparse else gradient
        if value.numel():
            values.append(value)
            (half if value.dtype in HALF else wide).append(value)
    if isinstance(scale, Tensor) or scale != 1.0:
        scale = torch.as_tensor(scale, device=device)
    measured = norm = None
    if amax is None:
        with_norm = with_norm and not half and not isinstance(scale, Tensor)
        amax, norm = _measure(half, wide, device, with_norm)
        measured = amax
    if isinstance(scale, Tensor):
        torch._foreach_div_([*wide, amax], scale)
    return Gradients(by_master, values, half, wide, scale, amax, measured, known_norm=norm)


def as_count(count: Tensor | float, device: torch.device) -> Tensor:
    """Return a count as a 0-d tensor, the `widest`, without waiting for the device."""
    if isinstance(count, Tensor):
        return count.detach().to(device, widest(device))
    return torch.full((), count, dtype=widest(device), device=device)


def check_clipping(**bounds: float | None) -> None:
    """Raise ConfigError unless at most one bound is given, by its name, finite and > 0."""
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    for name, bound in given.items():
        require(name, bound, POSITIVE, "None leaves the gradients as they are", "a finite number")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: cannot be combined; give only one")


def _measure(
    half: list[Tensor], wide: list[Tensor], device: torch.device, with_norm: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the largest magnitude and, `with_norm` of wide ones, their 2-norm: 0-d float32."""
    ends: list[Tensor] = []
    for values in filter(None, (half, wide)):
        if values[0].is_cpu:
            # On a CPU the infinity norm takes 9 to 20 times as long as finding both ends.
            ends += chain.from_iterable(map(torch.aminmax, values))
        else:
            kind = torch.float32 if values is half else None  # float64 cannot be narrowed.
            ends += torch._foreach_norm(values, torch.inf, kind)
    if not ends:
        return torch.zeros((), device=device), None
    norms = torch._foreach_norm(wide) if with_norm else ()
    # One kernel stacks both. The norms are first: where memory begins changes how kernels add.
    stacked, count = torch.stack([*norms, *ends]), len(norms)
    amax: Tensor = torch.linalg.vector_norm(stacked[count:], torch.inf)
    norm: Any = torch.linalg.vector_norm(stacked[:count]).float() if with_norm else None
    return amax.float(), norm


@dataclass(slots=True, eq=False)
class Accumulator:
    """Sums of the gradients of one step's micro-batches, in fp32."""

    filled: bool = False  # whether anything was added
    _only: Gradients | None = None
    _unit: Tensor = field(init=False)  # n_1, which all weights are relative to
    _sums: dict[Tensor, Tensor] = field(default_factory=dict)
    _amaxes: list[Tensor] = field(default_factory=list)
    _counts: list[Tensor] = field(default_factory=list)  # 0-d float64, 0 for a dropped micro-batch

    def add(self, gradients: Gradients) -> None:
        """Add and consume a micro-batch. It counts 0 if its amax is not finite."""
        if not self.filled:
            self._only, self.filled = gradients, True
            return
        for each in filter(None, (self._only, gradients)):
            self._sum(each)
        self._only = None

    def mean(self, masters: Iterable[Tensor], comm: Comm) -> Gradients:
        """Return the mean over all ranks' good micro-batches, in the memory of the sums.

        Its amax is inf or nan if there are none. All ranks have `masters` in the same order.
        """
        if self._only is not None and comm.size == 1:  # As it is: nothing is copied.
            only, count, amax = self._only, self._only.count, self._only.amax
            if isinstance(count, Tensor) or not count:  # Without samples, skip.
                only.scaler_amax = amax
                only.amax = amax.masked_fill(as_count(count, amax.device) == 0, torch.inf)
            return only
        if self._only is not None:  # A rank's only micro-batch. Its amax is over all ranks.
            self._unit, kept = self._note(self._only), list(self._only.by_master)
            self._sums = dict(zip(kept, self._only.pop_fp32(kept), strict=True))
        unit, count = self._unit, torch.stack(self._counts).sum()
        if comm.size > 1 and comm.sharding is None:  # Shards were summed in the backward pass.
            unit, count = comm.mean(torch.stack([unit, count])).unbind()
            self._sum_over(comm, list(masters), (self._unit / unit).float())
        amaxes = torch.stack(self._amaxes)
        bad = not_finite(amaxes)
        divisor = comm.data_size * (count / unit).float()  # Without good ones the mean is 0 / 0.
        mean = measure_grads(self._sums, divisor, bad.device)
        # Reduced once more: one of the ranks may have received damaged sums.
        mean.amax = comm.max(mean.amax)
        mean.dropped = None if len(amaxes) == 1 else bad.sum()
        mean.scaler_amax = amaxes.max()
        return mean

    def _note(self, gradients: Gradients) -> Tensor:
        """Note a micro-batch's amax and what it counts; return its count, 0-d float64."""
        count = as_count(gradients.count, gradients.amax.device)
        self._amaxes.append(gradients.amax)
        self._counts.append(count * (gradients.amax < torch.inf))
        return count

    def _sum(self, gradients: Gradients) -> None:
        """Add one of several micro-batches, times its count, or nothing if it is bad."""
        count = self._note(gradients)
        if len(self._counts) == 1:
            self._unit = count.masked_fill(count == 0, 1.0)
        weight, bad = (count / self._unit).float(), self._counts[-1] == 0
        for masters in in_chunks(list(gradients.by_master)):
            fresh, added = [], defaultdict(list)
            for master, gradient in zip(masters, gradients.pop_fp32(masters), strict=True):
                kept = self._sums.get(master)
                if gradient.is_sparse or (kept is not None and kept.is_sparse):
                    self._sums[master] = _add_sparse(kept, gradient, weight, bad)
                    continue
                if kept is None:
                    fresh.append(self._sums.setdefault(master, torch.empty_like(gradient)))
                added[gradient.dtype].append((self._sums[master], gradient))
            if fresh:
                torch._foreach_zero_(fresh)
            for pairs in added.values():
                _add_unless(bad, pairs, weight)

    def _sum_over(self, comm: Comm, masters: list[Tensor], weight: Tensor) -> None:
        """Add the sums of all ranks, with zeros for parameters that only other ranks used."""
        used = comm.max_of([master in self._sums for master in masters])
        # In one order on all ranks.
        self._sums = {
            master: self._sums[master]
            if master in self._sums
            else to_fp32(torch.zeros_like(master))
            for master, anywhere in zip(masters, used, strict=True)
            if anywhere
        }
        sums = list(self._sums.values())
        if any(gradient.is_sparse for gradient in sums):
            raise ConfigError(
                "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the "
                "layer with sparse=False"
            )
        weigh_(sums, weight)
        comm.sum_(sums)


def _add_sparse(kept: Tensor | None, gradient: Tensor, weight: Tensor, bad: Tensor) -> Tensor:
    """Return kept + weight * gradient, of which one at least is sparse."""
    (gradient._values() if gradient.is_sparse else gradient).masked_fill_(bad, 0.0)
    gradient = gradient * weight
    if kept is None:
        return gradient
    # torch adds a sparse tensor to a dense one, and not the other way round.
    return gradient + kept if kept.is_sparse else kept + gradient


def _add_unless(bad: Tensor, pairs: Iterable[tuple[Tensor, Tensor]], weight: Tensor) -> None:
    """Add weight * gradient to each sum in place, unless `bad`, in one kernel for all.

    Only torch's fused optimizers skip on the device: this is a step of SGD, upwards.
    """
    if is_apple(bad.device):
        for kept, gradient in pairs:
            kept.add_((gradient * weight).masked_fill_(bad, 0.0))
        return
    sums, gradients = [], []
    for kept, gradient in pairs:
        if gradient.stride() != kept.stride():  # The kernel takes both as they lie in memory.
            gradient = torch.empty_like(kept).copy_(gradient)
        sums.append(kept)
        gradients.append(gradient)
    plain: Any = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    options: Any = {"lr": weight, "found_inf": bad.float(), "maximize": True, **plain}
    torch._fused_sgd_(sums, gradients, [], **options, is_first_step=False)


def in_chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors, in their order, into lists that do not have too many values."""
    chunk: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if chunk and filled + tensor.numel() > (_SIZE_ON_CPU if tensor.is_cpu else _SIZE):
            yield chunk
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += tensor.numel()
    yield chunk
