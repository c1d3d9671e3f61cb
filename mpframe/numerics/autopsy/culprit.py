"""From what replays observed to the first call in which a value left the range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.data.loading import named_leaves
from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.magnitudes import bad_rows, magnitudes_of
from mpframe.numerics.autopsy.replay import Pass, Replay
from mpframe.numerics.autopsy.watch import FirstNonFinite, Observation, OpCall
from mpframe.tree import dtype_name


@dataclass(frozen=True)
class Culprit:
    """Where a value first left the range.

    Attributes:
        call: module and op; for a batch or a weight that was not finite to begin with, its name.
        direction: `forward`, `backward`, or `data` or `weights` for what was there before.
        value: the largest magnitude there in the fp32 replay, gradients times the scale; inf or
            nan if it is not finite in fp32 either.
        what: what has that magnitude: `result`, `input`, `gradient`.
        limit: the largest number of the format.
        half: the format.
        batch: number of the micro-batch.
        samples: the dataset's indices of the samples that have it (or, if unknown, their places
            in the micro-batch); empty if it cannot be attributed.
        objective: the name of the loss; empty if there is only one.
        origin: where the forward pass first made so large a number in fp32, if that was not here:
            it leaves the format only when a half op takes it as input.
        receiver: the call in another module that receives the gradient; None if there is none.
    """

    call: OpCall
    direction: str
    value: float
    what: str
    limit: float
    half: str
    batch: int = 0
    samples: tuple[int, ...] = ()
    objective: str = ""
    origin: OpCall | None = None
    receiver: OpCall | None = None

    @property
    def bits_beyond(self) -> float:
        """How far the value is above the limit, in bits; negative if below."""
        return math.log2(self.value / self.limit) if 0 < self.value < math.inf else math.inf


def culprit_of_inputs(case: Case) -> Culprit | None:
    """A sample or a weight that is not finite before anything has run; None if all are."""
    for number, batch in enumerate(case.batches):
        for name, tensor in named_leaves(batch):
            seen = magnitudes_of(tensor)
            if not seen.finite:
                rows = bad_rows(tensor, case.count(number))
                call = OpCall("", name or "values")
                return _found(case, call, "data", seen.nan, (number, _ids(case, number, rows), ""))
    masks = {name for name, buffer in case.model.named_buffers() if _is_mask(buffer)}
    for name, weight in [*case.model.named_parameters(), *case.model.named_buffers()]:
        seen = magnitudes_of(weight)
        if not seen.finite and name not in masks:
            module, _, own = name.rpartition(".")
            return _found(case, OpCall(module, own), "weights", seen.nan, (0, (), ""))
    return None


def _is_mask(buffer: Tensor) -> bool:
    """True if all that is not finite is -inf, which attention adds to hide positions."""
    return not bool((buffer.isnan() | buffer.isposinf()).any())


def culprit_of_fp32(case: Case, full: Replay) -> Culprit | None:
    """Where the fp32 replay itself leaves the range of fp32."""
    for one in full.passes:
        if one.finite:
            continue
        direction = "forward" if not one.loss_finite else "backward"
        nonfinite = one.trace.nonfinite_in(direction) or one.trace.nonfinite
        if nonfinite:
            first = nonfinite[0]
            where = (one.batch, _ids(case, one.batch, first.rows), one.objective)
            return _found(case, first.call, first.direction, first.nan, where)
    return None


def culprit_of(case: Case, own: Replay, full: Replay) -> Culprit | None:
    """Where a replay leaves the range and the fp32 replay of the same step does not.

    The forward pass is examined first. If its loss is finite, the values in it did no harm, unless
    the backward pass multiplies them by 0.
    """
    for one, wide in zip(own.passes, full.passes, strict=True):
        if not one.finite:
            first = _first_of_half_alone(one, wide)
            if first is not None:
                return _measured(case, first, one, wide)
    return None


def _first_of_half_alone(one: Pass, wide: Pass) -> FirstNonFinite | None:
    harmless = {(first.call, first.direction) for first in wide.trace.nonfinite}
    nonfinite = [own for own in one.trace.nonfinite if (own.call, own.direction) not in harmless]
    forward = [first for first in nonfinite if first.direction == "forward"]
    backward = [first for first in nonfinite if first.direction == "backward"]
    if not one.loss_finite:
        return next(iter(forward or backward), None)
    if backward and not (backward[0].nan and forward):
        return backward[0]
    return next(iter(forward), None)


def _measured(case: Case, first: FirstNonFinite, one: Pass, wide: Pass) -> Culprit:
    observations = wide.trace.observations(first.direction)
    # A cast that only the half replay makes is not in the fp32 one, so the half one's is used.
    seen = observations.get(first.call)
    times = one.scale
    if seen is None:
        seen, times = one.trace.observations(first.direction)[first.call], 1.0
    limit = torch.finfo(case.half).max
    value, what = _value(first, seen, times, limit)
    return Culprit(
        first.call,
        first.direction,
        value,
        what,
        limit,
        dtype_name(case.half),
        one.batch,
        _ids(case, one.batch, first.rows),
        one.objective,
        _origin(wide, limit) if what == "input" else None,
        _receiver(one, first) if first.direction == "backward" else None,
    )


def _origin(wide: Pass, limit: float) -> OpCall | None:
    """The op that first made a number beyond the limit of finite ones within it."""
    made = (
        call
        for call, seen in wide.trace.forward.items()
        if seen.inputs.largest <= limit < seen.outputs.largest
    )
    return next(made, None)


def _receiver(one: Pass, first: FirstNonFinite) -> OpCall | None:
    calls = list(one.trace.backward)
    later = calls[calls.index(first.call) + 1 :]
    return next((call for call in later if call.module != first.call.module), None)


def _value(
    first: FirstNonFinite, seen: Observation, times: float, limit: float
) -> tuple[float, str]:
    if first.direction == "backward":
        return max(seen.inputs.largest, seen.outputs.largest) * times, "gradient"
    if seen.inputs.largest > limit:
        return seen.inputs.largest, "input"
    return seen.outputs.largest, "result"


def _found(
    case: Case, call: OpCall, direction: str, nan: bool, where: tuple[int, tuple[int, ...], str]
) -> Culprit:
    batch, samples, objective = where
    limit = torch.finfo(torch.float32).max
    value = math.nan if nan else math.inf
    what = {"data": "sample", "weights": "weight", "backward": "gradient"}.get(direction, "result")
    return Culprit(call, direction, value, what, limit, "float32", batch, samples, objective)


def _ids(case: Case, batch: int, rows: Sequence[int]) -> tuple[int, ...]:
    known = case.samples[batch] if batch < len(case.samples) else ()
    return tuple(known[row] if row < len(known) else row for row in rows)
