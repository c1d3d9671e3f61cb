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
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from mpframe.loss_scaling.powers import safe_scale
from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.culprit import (
    Culprit,
    culprit_of,
    culprit_of_fp32,
    culprit_of_inputs,
)
from mpframe.numerics.autopsy.replay import Replay, Setting, replay
from mpframe.numerics.autopsy.saturation import Saturation, saturation_in
from mpframe.numerics.autopsy.underflow import (
    culprit_of_underflow,
    largest_gradient,
    underflow_share,
)
from mpframe.numerics.autopsy.watch import OUTSIDE
from mpframe.precision.spellings import known_ops

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
