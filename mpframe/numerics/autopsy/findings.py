"""From what replays saw to the first place that left the range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.magnitudes import bad_rows, magnitudes_of
from mpframe.numerics.autopsy.replay import Pass, Replay
from mpframe.numerics.autopsy.watch import Birth, Place, Sight


@dataclass(frozen=True)
class Finding:
    """The first value out of range.

    Attributes:
        place: module and op; for a batch or a weight that was not finite to begin with, its name.
        direction: `forward`, `backward`, or `data` or `weights` for what was there before.
        value: the largest magnitude there by the fp32 replay, gradients times the scale; inf or nan
            where fp32 has none either.
        what: what has that magnitude: `result`, `input`, `gradient`.
        limit: the largest number of the format.
        half: the format.
        batch: number of the micro-batch.
        samples: the dataset's indices (or else places in the micro-batch) of the samples it shows
            in; empty where that cannot be told.
        objective: the loss; empty where there is one.
        origin: where the forward pass first made so large a number, in fp32 and harmlessly, if that
            was not here: the format only ends where a half op takes it in.
        receiver: the op of another module that is handed the gradient; None where there is none.
    """

    place: Place
    direction: str
    value: float
    what: str
    limit: float
    half: str
    batch: int = 0
    samples: tuple[int, ...] = ()
    objective: str = ""
    origin: Place | None = None
    receiver: Place | None = None

    @property
    def bits_beyond(self) -> float:
        """How far the value lies above the limit, in bits; below it where negative."""
        return math.log2(self.value / self.limit) if 0 < self.value < math.inf else math.inf


def first_bad_input(case: Case) -> Finding | None:
    """A sample or a weight that is not finite before anything has run; None where all are."""
    for number, (inputs, targets) in enumerate(case.batches):
        for name, node in (("inputs", inputs), ("targets", targets)):
            seen = magnitudes_of(node)
            if not seen.finite:
                rows = bad_rows(node, len(targets))
                place = Place("", name)
                return _found(case, place, "data", seen.nan, (number, _ids(case, number, rows), ""))
    masks = {name for name, buffer in case.model.named_buffers() if _is_mask(buffer)}
    for name, weight in [*case.model.named_parameters(), *case.model.named_buffers()]:
        seen = magnitudes_of(weight)
        if not seen.finite and name not in masks:
            module, _, own = name.rpartition(".")
            return _found(case, Place(module, own), "weights", seen.nan, (0, (), ""))
    return None


def _is_mask(buffer: Tensor) -> bool:
    """True where all that is not finite is -inf, which attention adds to what is not to be seen."""
    return not bool((buffer.isnan() | buffer.isposinf()).any())


def first_of_fp32(case: Case, full: Replay) -> Finding | None:
    """Where the fp32 replay itself leaves the range of fp32."""
    for one in full.passes:
        if one.finite:
            continue
        direction = "forward" if not one.loss_finite else "backward"
        births = one.trace.born(direction) or one.trace.births
        if births:
            birth = births[0]
            where = (one.batch, _ids(case, one.batch, birth.rows), one.objective)
            return _found(case, birth.place, birth.direction, birth.nan, where)
    return None


def first_of(case: Case, own: Replay, full: Replay) -> Finding | None:
    """Where a replay leaves the range and the fp32 replay of the same step does not.

    The forward pass comes first. Where its loss is finite all the same, what it met was harmless,
    unless the backward pass multiplies it by 0.
    """
    for one, wide in zip(own.passes, full.passes, strict=True):
        if not one.finite:
            birth = _culprit(one, wide)
            if birth is not None:
                return _measured(case, birth, one, wide)
    return None


def _culprit(one: Pass, wide: Pass) -> Birth | None:
    innocent = {(birth.place, birth.direction) for birth in wide.trace.births}
    births = [b for b in one.trace.births if (b.place, b.direction) not in innocent]
    forward = [birth for birth in births if birth.direction == "forward"]
    backward = [birth for birth in births if birth.direction == "backward"]
    if not one.loss_finite:
        return next(iter(forward or backward), None)
    if backward and not (backward[0].nan and forward):
        return backward[0]
    return next(iter(forward), None)


def _measured(case: Case, birth: Birth, one: Pass, wide: Pass) -> Finding:
    sights = wide.trace.sights(birth.direction)
    # A cast that only the half replay makes is not in the fp32 one: its own sight has to do.
    sight = sights.get(birth.place)
    times = one.scale
    if sight is None:
        sight, times = one.trace.sights(birth.direction)[birth.place], 1.0
    limit = torch.finfo(case.half).max
    value, what = _value(birth, sight, times, limit)
    return Finding(
        birth.place,
        birth.direction,
        value,
        what,
        limit,
        format_name(case.half),
        one.batch,
        _ids(case, one.batch, birth.rows),
        one.objective,
        _origin(wide, limit) if what == "input" else None,
        _receiver(one, birth) if birth.direction == "backward" else None,
    )


def _origin(wide: Pass, limit: float) -> Place | None:
    """The op that first made a number beyond the limit of finite ones within it."""
    made = (
        place
        for place, sight in wide.trace.forward.items()
        if sight.given.largest <= limit < sight.gave.largest
    )
    return next(made, None)


def _receiver(one: Pass, birth: Birth) -> Place | None:
    places = list(one.trace.backward)
    later = places[places.index(birth.place) + 1 :]
    return next((place for place in later if place.module != birth.place.module), None)


def _value(birth: Birth, sight: Sight, times: float, limit: float) -> tuple[float, str]:
    if birth.direction == "backward":
        return max(sight.given.largest, sight.gave.largest) * times, "gradient"
    if sight.given.largest > limit:
        return sight.given.largest, "input"
    return sight.gave.largest, "result"


def _found(
    case: Case, place: Place, direction: str, nan: bool, where: tuple[int, tuple[int, ...], str]
) -> Finding:
    batch, samples, objective = where
    limit = torch.finfo(torch.float32).max
    value = math.nan if nan else math.inf
    what = {"data": "sample", "weights": "weight", "backward": "gradient"}.get(direction, "result")
    return Finding(place, direction, value, what, limit, "float32", batch, samples, objective)


def _ids(case: Case, batch: int, rows: Sequence[int]) -> tuple[int, ...]:
    known = case.samples[batch] if batch < len(case.samples) else ()
    return tuple(known[row] if row < len(known) else row for row in rows)


def format_name(dtype: torch.dtype) -> str:
    """`float16`, `bfloat16` or `float32`."""
    return str(dtype).removeprefix("torch.")
