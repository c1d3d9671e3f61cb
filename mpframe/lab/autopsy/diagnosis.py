"""The diagnosis of a step, from replays of it.

    the fp32 replay is not finite                                          NOT_FINITE_IN_FP32
    fp32 is finite and its loss is 1000 times what the run began with      DIVERGING
    the run's replay is not finite:
        it is finite at a scale that the scaler may still take             SCALE_TOO_HIGH
        it is not, or at that scale many gradients underflow               BEYOND_FORMAT
    it is finite:
        many gradients underflow, and fewer at a higher scale              UNDERFLOW
        otherwise                                                          NO_FAULT

A remedy is tried, not guessed: modules are pinned to fp32, the first culprit and then the next,
until the replay is finite.

Underflow means gradients below half's normal range.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from mpframe.core.tree import dtype_name
from mpframe.data.fetching import named_leaves
from mpframe.lab.autopsy.replay import Case, Pass, Replay, Setting, replay
from mpframe.lab.autopsy.watch import OUTSIDE, FirstNonFinite, OpCall, bad_rows, magnitudes_of
from mpframe.precision.op_lists import known_ops


@dataclass(frozen=True)
class Culprit:
    """The place where a value first left the range."""

    call: OpCall  # or the name of a batch's tensor or a weight that was not finite to begin with
    direction: str  # `forward` or `backward`, or for a value from before `data` or `weights`
    # The largest magnitude in the fp32 replay, gradients times the scale, or inf or nan.
    value: float
    what: str  # has that magnitude: `result`, `input`, `gradient`, or `value` before all ops
    limit: float  # the largest number of the format
    half: str  # the format
    batch: int = 0  # number of the micro-batch
    samples: tuple[int, ...] = ()  # indices in the dataset, or else places in the micro-batch
    objective: str = ""  # the name of the loss
    # An earlier op that made so large a number in fp32, which a half op then takes as its input.
    origin: OpCall | None = None
    receiver: OpCall | None = None  # the call in another module that receives the gradient


def culprit_of_inputs(case: Case) -> Culprit | None:
    """Find a sample or a weight that is not finite before anything has run."""
    for number, batch in enumerate(case.batches):
        for name, tensor in named_leaves(batch):
            seen = magnitudes_of(tensor)
            if not seen.finite:
                samples = _ids(case, number, bad_rows(tensor, case.count(number)))
                call = OpCall("", name or "values")
                return _nonfinite(call, "data", seen.nan, number, samples)
    # A mask's only values that are not finite are -inf, which attention adds to hide positions.
    masks = {n for n, b in case.model.named_buffers() if not (b.isnan() | b.isposinf()).any()}
    for name, weight in [*case.model.named_parameters(), *case.model.named_buffers()]:
        seen = magnitudes_of(weight)
        if not seen.finite and name not in masks:
            module, _, last = name.rpartition(".")
            return _nonfinite(OpCall(module, last), "weights", seen.nan)
    return None


def culprit_of_fp32(case: Case, full: Replay) -> Culprit | None:
    """Find where the fp32 replay itself leaves the range of fp32."""
    for one in full.passes:
        if not one.finite and (first := _first_nonfinite(one)):
            samples, name = _ids(case, one.batch, first.rows), one.objective
            return _nonfinite(first.call, first.direction, first.nan, one.batch, samples, name)
    return None


def culprit_of(case: Case, half: Replay, full: Replay) -> Culprit | None:
    """Find where a replay leaves the range and the fp32 replay of the same step does not."""
    for one, wide in zip(half.passes, full.passes, strict=True):
        if not one.finite and (first := _first_nonfinite(one, wide.trace.nonfinite)):
            return _culprit_at(case, first, one, wide)
    return None


def _first_nonfinite(one: Pass, also: Sequence[FirstNonFinite] = ()) -> FirstNonFinite | None:
    """Find the first value that is not finite, forward first, except what `also` has.

    If the loss is finite, the forward pass did no harm, unless the backward pass multiplies by 0.
    """
    harmless = {(first.call, first.direction) for first in also}
    made = one.trace.nonfinite
    nonfinite = [seen for seen in made if (seen.call, seen.direction) not in harmless]
    forward = [first for first in nonfinite if first.direction == "forward"]
    backward = [first for first in nonfinite if first.direction == "backward"]
    harmed = not one.loss_finite or not backward or backward[0].nan
    return next(iter(forward + backward if harmed else backward), None)


def _culprit_at(case: Case, first: FirstNonFinite, one: Pass, wide: Pass) -> Culprit:
    seen, times = wide.trace.observations(first.direction).get(first.call), one.scale
    if seen is None:  # A cast that only the half replay makes.
        seen, times = one.trace.observations(first.direction)[first.call], 1.0
    limit = torch.finfo(case.half).max
    origin = receiver = None
    if first.direction == "backward":
        value, what = max(seen.inputs.largest, seen.outputs.largest) * times, "gradient"
        calls = list(one.trace.backward)
        later = calls[calls.index(first.call) + 1 :]
        receiver = next((call for call in later if call.module != first.call.module), None)
    elif seen.inputs.largest > limit:
        value, what = seen.inputs.largest, "input"
        ops = wide.trace.forward.items()
        made = (op for op, o in ops if o.inputs.largest <= limit < o.outputs.largest)
        origin = next(made, None)
    else:
        value, what = seen.outputs.largest, "result"
    samples, half = _ids(case, one.batch, first.rows), dtype_name(case.half)
    where = (one.batch, samples, one.objective, origin, receiver)
    return Culprit(first.call, first.direction, value, what, limit, half, *where)


def _nonfinite(call: OpCall, direction: str, nan: bool, *where: Any) -> Culprit:
    """Make a culprit that is not finite in fp32 either, with its batch, samples and objective."""
    limit = torch.finfo(torch.float32).max
    value = math.nan if nan else math.inf
    what = {"data": "value", "weights": "value", "backward": "gradient"}.get(direction, "result")
    return Culprit(call, direction, value, what, limit, "float32", *where)


def _ids(case: Case, batch: int, rows: Sequence[int]) -> tuple[int, ...]:
    known = case.samples[batch] if batch < len(case.samples) else ()
    return tuple(known[row] if row < len(known) else row for row in rows)


def underflow_share(half: Replay, full: Replay) -> float:
    """Return the share of half gradients below half's normal range that are not 0 in fp32.

    Each element of op results' and weights' gradients counts once, if it is stored in half.
    """
    nonzero = kept = 0
    for one, wide in zip(half.passes, full.passes, strict=True):
        for key, count in one.trace.gradients.items():
            there = wide.trace.gradients.get(key)
            if there is not None and count.narrow:
                nonzero += there.nonzero
                kept += min(count.normal, there.nonzero)
    return 1.0 - kept / nonzero if nonzero else 0.0


UNDERFLOW_LIMIT = 0.25
"""Share of gradients below the normal range above which a scale counts as too low."""
_GAIN = 0.5  # A better scale must at least halve that share.
_DIVERGED = 1000.0  # times the first loss
_MOST_PINS = 16


class Kind(Enum):
    SCALE_TOO_HIGH = "scale too high (normal)"
    BEYOND_FORMAT = "beyond the format"
    NOT_FINITE_IN_FP32 = "not finite in fp32 too: model, data or learning rate"
    DIVERGING = "diverging, in fp32 too: learning rate, model or data"
    UNDERFLOW = "underflow: scale too low"
    NO_FAULT = "no fault found"


@dataclass(frozen=True)
class Diagnosis:
    """A step's fault, and its remedy. Unknown shares are nan."""

    kind: Kind
    culprit: Culprit | None
    remedy: Setting = field(default_factory=Setting)  # modules to pin, ops to move to fp32
    proven: bool = False  # the step is finite with the remedy
    octaves: int = 0  # by which the scale must change for a finite step (< 0), or less underflow
    underflow: float = math.nan  # share of half gradients below half's normal range
    underflow_then: float = math.nan  # the same at the changed scale
    replays: tuple[Replay, ...] = ()  # all of them, in order


def diagnose(case: Case) -> Diagnosis:
    """Replay a step until it is clear what is wrong with it. The model is left as it was."""
    return _Examination(case).diagnosis()


class _Examination:
    """Makes the replays that are needed, each once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._made: dict[Setting, Replay] = {}

    def diagnosis(self) -> Diagnosis:
        return replace(self._judge(), replays=tuple(self._made.values()))

    def _judge(self) -> Diagnosis:
        full, half = self._replay(Setting(fp32=True)), self._replay(Setting())
        if not full.finite:
            culprit = culprit_of_inputs(self._case) or culprit_of_fp32(self._case, full)
            return Diagnosis(Kind.NOT_FINITE_IN_FP32, culprit)
        if half.finite:
            return self._of_finite(half, full)
        culprit, first = culprit_of(self._case, half, full), self._case.first_loss
        if first is not None and abs(full.loss) > _DIVERGED * max(abs(first), 1e-6):
            return Diagnosis(Kind.DIVERGING, culprit)
        return self._of_overflow(culprit, full)

    def _of_overflow(self, culprit: Culprit | None, full: Replay) -> Diagnosis:
        down = self._octaves_down()
        if not down:
            pins, proven = self._pin_culprits(-self._case.room_below)
            return Diagnosis(Kind.BEYOND_FORMAT, culprit, pins, proven)
        underflow = underflow_share(self._scaled(-down), full)
        if underflow > UNDERFLOW_LIMIT:
            pins, proven = self._pin_culprits(0)
            if proven and underflow_share(self._replay(pins), full) < underflow * _GAIN:
                return Diagnosis(Kind.BEYOND_FORMAT, culprit, pins, proven)
        return Diagnosis(Kind.SCALE_TOO_HIGH, culprit, octaves=-down, underflow_then=underflow)

    def _of_finite(self, half: Replay, full: Replay) -> Diagnosis:
        underflow = underflow_share(half, full)
        if underflow > UNDERFLOW_LIMIT:
            up = self._octaves_up()
            then = underflow_share(self._scaled(up), full)
            if then < underflow * _GAIN:
                return Diagnosis(
                    Kind.UNDERFLOW, None, octaves=up, underflow=underflow, underflow_then=then
                )
        return Diagnosis(Kind.NO_FAULT, None, underflow=underflow)

    def _octaves_down(self) -> int:
        """Find the fewest octaves that make the step finite, 0 if no allowed number does."""
        most = self._case.room_below
        if most == 0 or not self._scaled(-most).finite:
            return 0
        return 1 + bisect_left(range(1, most), True, key=lambda down: self._scaled(-down).finite)

    def _octaves_up(self) -> int:
        """Find by how many octaves the scale could grow, with one to spare, 0 if it cannot."""
        most = 126 - math.ceil(math.log2(max(self._case.scales.values())))
        fit = bisect_left(range(1, most + 1), True, key=lambda up: not self._scaled(up).finite)
        return max(fit - 1, 0)

    def _pin_culprits(self, octaves: int) -> tuple[Setting, bool]:
        """Pin culprit after culprit to fp32 until the step is finite, and say whether it is."""
        setting = Setting(octaves=octaves)
        full = self._replay(Setting(fp32=True))
        for _ in range(_MOST_PINS + 1):
            now = self._replay(setting)
            if now.finite:
                return setting, setting != Setting(octaves=octaves)
            culprit = culprit_of(self._case, now, full)
            more = None if culprit is None else _with(setting, culprit)
            if more is None:
                break
            setting = more
        return setting, False

    def _scaled(self, octaves: int) -> Replay:
        return self._replay(Setting(octaves=octaves))

    def _replay(self, setting: Setting) -> Replay:
        if setting not in self._made:
            self._made[setting] = replay(self._case, setting)
        return self._made[setting]


def _with(setting: Setting, culprit: Culprit) -> Setting | None:
    """Put one more module or op in fp32, if that is new."""
    # A pinned module passes its gradient on through a cast, so its receiver comes next.
    for call in (culprit.call, culprit.receiver):
        if call is None or call.module == OUTSIDE:
            continue
        if call.module and call.module not in setting.pins:
            return replace(setting, pins=(*setting.pins, call.module))
        if not call.module and call.op in known_ops() - set(setting.denied):
            return replace(setting, denied=(*setting.denied, call.op))
    return None
