"""The diagnosis of a step, from replays of it.

    the fp32 replay is not finite                                          NOT_FINITE_IN_FP32
    fp32 is finite and its loss is 1000 times what the run began with      DIVERGING
    the run's replay is not finite:
        it is finite at a scale that the scaler may still take             SCALE_TOO_HIGH
        it is not, or at that scale many gradients underflow               BEYOND_FORMAT
    it is finite:
        many gradients underflow, and fewer at a higher scale              UNDERFLOW
        an operand of a product is cut off at its scale                    SATURATED
        otherwise                                                          NO_FAULT

A remedy is tried, not guessed: modules are pinned to fp32, the first culprit and then the next,
until the replay is finite.

`Culprit` is the first call in which a value left the range. `Saturation` is an operand of a product
below 16 bits whose scale is too small: most of it is cut off, although the step is finite and no
loss scale helps. It happens if scales do not follow the values, such as `fp8_delayed`'s when values
grow suddenly. Underflow means gradients below half's normal range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from mpframe.core.loss_scaling.scaler import safe_scale
from mpframe.core.op_lists import known_ops
from mpframe.core.tree import dtype_name
from mpframe.data.loading import named_leaves
from mpframe.lab.autopsy.replay import Case, Pass, Replay, Setting, replay
from mpframe.lab.autopsy.watch import (
    OUTSIDE,
    FirstNonFinite,
    Observation,
    OpCall,
    bad_rows,
    magnitudes_of,
)
from mpframe.lab.product_noise import Noise, ProductProbe


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


_LEAST_SIGNAL = 10.0  # decibels: the noise has a tenth of the signal's energy


@dataclass(frozen=True)
class Saturation:
    """What was cut off.

    Attributes:
        layer: its name.
        operand: product and operand, as `forward.x`.
        noise: what was counted.
    """

    layer: str
    operand: str
    noise: Noise


def saturation_in(case: Case) -> Saturation | None:
    """The operand that keeps the least of its signal, if values beyond the range are to blame."""
    if not case.precision.policy.recipes:
        return None
    probe = ProductProbe(case.precision)
    try:
        replay(case, Setting())
    finally:
        noises = probe.noises()
    found = [
        Saturation(*key, noise)
        for key, noise in noises.items()
        if noise.saturated > 0 and noise.snr_db < _LEAST_SIGNAL
    ]
    return min(found, key=lambda own: own.noise.snr_db, default=None)


def underflow_share(own: Replay, full: Replay, kept_as: str = "normal") -> float:
    """The share of half gradients below half's normal range, among those that fp32 has.

    Gradients of op results and of weights count alike, each element once; 0 to 1. Only gradients
    that are stored in half count. With `kept_as="nonzero"` it is the share of those that are 0.
    """
    nonzero, kept = _kept(own.passes, full.passes, kept_as)
    return 1.0 - sum(kept.values()) / sum(nonzero.values()) if sum(nonzero.values()) else 0.0


def culprit_of_underflow(case: Case, own: Replay, full: Replay) -> Culprit | None:
    """The module with the largest share of underflow, and its largest gradient."""
    nonzero, kept = _kept(own.passes, full.passes)
    if not nonzero:
        return None
    module = max(nonzero, key=lambda name: (1 - kept[name] / nonzero[name], nonzero[name]))
    observations = [
        (call, seen.inputs.largest)
        for call, seen in full.passes[0].trace.backward.items()
        if call.module == module
    ]
    call, largest = max(
        observations, key=lambda pair: pair[1], default=(OpCall(module, "weight"), 0.0)
    )
    info = torch.finfo(case.half)
    value = largest * own.passes[0].scale
    return Culprit(call, "backward", value, "gradient", info.smallest_normal, dtype_name(case.half))


def largest_gradient(own: Replay, full: Replay) -> float:
    """The largest unscaled gradient, in fp32, of those that the run stores in half."""
    found = [0.0]
    for narrow, wide in zip(own.passes, full.passes, strict=True):
        there = wide.trace.gradients
        held = (key for key, count in narrow.trace.gradients.items() if count.narrow)
        found += [there[key].largest for key in held if key in there]
    return max(found)


def _kept(
    own: Sequence[Pass], full: Sequence[Pass], kept_as: str = "normal"
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """By module: gradients that fp32 has, and how many of them half keeps, as `Count` says."""
    nonzero: dict[str, int] = {}
    kept: dict[str, int] = {}
    for one, wide in zip(own, full, strict=True):
        for key, count in one.trace.gradients.items():
            there = wide.trace.gradients.get(key)
            if there is None or not count.narrow or not there.nonzero:
                continue
            module = key[0].rpartition(".")[0] if key[1] == "weight" else key[0]
            nonzero[module] = nonzero.get(module, 0) + there.nonzero
            kept[module] = kept.get(module, 0) + min(getattr(count, kept_as), there.nonzero)
    return nonzero, kept


UNDERFLOW_LIMIT = 0.25
"""Share of gradients below the normal range above which a scale counts as too low."""
_GAIN = 0.5  # A better scale must at least halve that share.
_DIVERGED = 1000.0  # times the first loss
_MOST_PINS = 16


class Kind(Enum):
    """What is wrong with a step."""

    SCALE_TOO_HIGH = "scale too high (normal)"
    BEYOND_FORMAT = "beyond the format"
    NOT_FINITE_IN_FP32 = "not finite in fp32 too: model, data or learning rate"
    DIVERGING = "diverging, in fp32 too: learning rate, model or data"
    UNDERFLOW = "underflow: scale too low"
    SATURATED = "saturated: beyond the scale of a product"
    NO_FAULT = "no fault found"


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a step and what helps.

    Attributes:
        kind: the diagnosis.
        culprit: where a value first left the range; None if none did.
        remedy: modules to pin and ops to move to fp32; empty if that does not help.
        proven: the step is finite with the remedy.
        octaves: by which the scale must change for the step to be finite (< 0), or for fewer
            gradients to underflow (> 0); 0 if that does not help.
        underflow: share of half gradients below half's normal range at the present scale, and
            `underflow_then` at the changed one; nan if unknown.
        zeros: share of half gradients that are 0 here and not in fp32; nan if unknown.
        saturation: the operand that is cut off; None unless that is what is wrong.
        replays: all of them, in order.
    """

    kind: Kind
    culprit: Culprit | None
    remedy: Setting = field(default_factory=Setting)
    proven: bool = False
    octaves: int = 0
    underflow: float = math.nan
    underflow_then: float = math.nan
    zeros: float = math.nan
    saturation: Saturation | None = None
    replays: tuple[Replay, ...] = ()


def diagnose(case: Case) -> Diagnosis:
    """Replay a step until it is clear what is wrong with it. The model is left as it was."""
    return _Examination(case).diagnosis()


class _Examination:
    """Makes the replays that are needed, each once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._made: dict[Setting, Replay] = {}

    def diagnosis(self) -> Diagnosis:
        full, own = self._replay(Setting(fp32=True)), self._replay(Setting())
        if not full.finite:
            culprit = culprit_of_inputs(self._case) or culprit_of_fp32(self._case, full)
            return self._diagnosis(Kind.NOT_FINITE_IN_FP32, culprit)
        if own.finite:
            return self._of_finite(own, full)
        culprit = culprit_of(self._case, own, full)
        if self._diverging(full):
            return self._diagnosis(Kind.DIVERGING, culprit)
        return self._of_overflow(culprit, full)

    def _diverging(self, full: Replay) -> bool:
        first = self._case.first_loss
        return first is not None and abs(full.loss) > _DIVERGED * max(abs(first), 1e-6)

    def _of_overflow(self, culprit: Culprit | None, full: Replay) -> Diagnosis:
        down = self._octaves_down()
        if down:
            lower = self._replay(Setting(octaves=-down))
            underflow = underflow_share(lower, full)
            if underflow > UNDERFLOW_LIMIT:
                pinned = self._pinned(0)
                if (
                    pinned.proven
                    and underflow_share(self._replay(pinned.setting), full) < underflow * _GAIN
                ):
                    return self._diagnosis(
                        Kind.BEYOND_FORMAT, culprit, remedy=pinned.setting, proven=True
                    )
            return self._diagnosis(
                Kind.SCALE_TOO_HIGH, culprit, octaves=-down, underflow_then=underflow, proven=True
            )
        pinned = self._pinned(-self._case.room_below)
        return self._diagnosis(
            Kind.BEYOND_FORMAT, culprit, remedy=pinned.setting, proven=pinned.proven
        )

    def _of_finite(self, own: Replay, full: Replay) -> Diagnosis:
        underflow, zeros = (underflow_share(own, full, kept) for kept in ("normal", "nonzero"))
        up = self._octaves_up(own, full)
        if underflow > UNDERFLOW_LIMIT and up > 0:
            then = underflow_share(self._replay(Setting(octaves=up)), full)
            if then < underflow * _GAIN:
                culprit = culprit_of_underflow(self._case, own, full)
                return self._diagnosis(
                    Kind.UNDERFLOW,
                    culprit,
                    octaves=up,
                    underflow=underflow,
                    underflow_then=then,
                    zeros=zeros,
                    proven=True,
                )
        saturation = saturation_in(self._case)
        kind = Kind.SATURATED if saturation else Kind.NO_FAULT
        return self._diagnosis(kind, None, underflow=underflow, zeros=zeros, saturation=saturation)

    def _octaves_down(self) -> int:
        """The least number of octaves that make the step finite; 0 if no allowed number does."""
        low, high = 0, self._case.room_below
        if high == 0 or not self._replay(Setting(octaves=-high)).finite:
            return 0
        while high - low > 1:  # Not finite at `low`, finite at `high`.
            middle = (low + high) // 2
            if self._replay(Setting(octaves=-middle)).finite:
                high = middle
            else:
                low = middle
        return high

    def _octaves_up(self, own: Replay, full: Replay) -> int:
        """By how many octaves the scale could grow, with one to spare; 0 if it cannot."""
        scale = max(self._case.scales.values())
        octaves = math.log2(safe_scale(largest_gradient(own, full) * scale, self._case.half) or 1.0)
        up = min(int(octaves), 126 - math.ceil(math.log2(scale)))
        while up > 0 and not self._replay(Setting(octaves=up)).finite:
            up -= 1
        return max(up, 0)

    def _pinned(self, octaves: int) -> "_Remedy":
        """Pin culprit after culprit to fp32 until the step is finite."""
        setting = Setting(octaves=octaves)
        full = self._replay(Setting(fp32=True))
        for _ in range(_MOST_PINS + 1):
            now = self._replay(setting)
            if now.finite:
                return _Remedy(setting, setting != Setting(octaves=octaves))
            culprit = culprit_of(self._case, now, full)
            more = None if culprit is None else _with(setting, culprit)
            if more is None:
                break
            setting = more
        return _Remedy(setting, False)

    def _diagnosis(self, kind: Kind, culprit: Culprit | None, **more: object) -> Diagnosis:
        replays = tuple(self._made.values())
        return Diagnosis(kind, culprit, replays=replays, **more)  # type: ignore[arg-type]

    def _replay(self, setting: Setting) -> Replay:
        if setting not in self._made:
            self._made[setting] = replay(self._case, setting)
        return self._made[setting]


@dataclass(frozen=True)
class _Remedy:
    setting: Setting
    proven: bool


def _with(setting: Setting, culprit: Culprit) -> Setting | None:
    """The setting with one more module or op in fp32; None if that is nothing new.

    A pinned module passes its gradient on through a cast: the receiver is then the next.
    """
    for call in (culprit.call, culprit.receiver):
        if call is None or call.module == OUTSIDE:
            continue
        if call.module and call.module not in setting.pins:
            return replace(setting, pins=(*setting.pins, call.module))
        if not call.module and call.op in known_ops() - set(setting.denied):
            return replace(setting, denied=(*setting.denied, call.op))
    return None
