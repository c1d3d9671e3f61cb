"""One verdict on a step, from replays of it.

    the fp32 replay is not finite                                          NOT_FINITE_IN_FP32
    fp32 is finite and its loss is 1000 times what the run began with      DIVERGING
    the run's replay is not finite:
        it is at a scale the scaler may still take                         SCALE_TOO_HIGH
        it is not, or that scale would lose many gradients                 BEYOND_FORMAT
    it is finite:
        many gradients are lost, and fewer at a higher scale               UNDERFLOW
        otherwise                                                          NO_FAULT

A remedy is not guessed but tried: modules are pinned to fp32, the first culprit and then the next,
until the replay is finite.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from mpframe.loss_scaling.powers import safe_scale
from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.findings import (
    Finding,
    first_bad_input,
    first_of,
    first_of_fp32,
)
from mpframe.numerics.autopsy.lost import largest_gradient, lost_share, most_lost
from mpframe.numerics.autopsy.replay import Replay, Setting, replay
from mpframe.numerics.autopsy.watch import OUTSIDE
from mpframe.precision.spellings import known_ops

LOST = 0.25  # Share of gradients below the normal range from which on a scale counts as too low.
_GAIN = 0.5  # A better scale must at least halve that share.
_DIVERGED = 1000.0  # Times the first loss.
_MOST_PINS = 16


class Kind(Enum):
    """What is wrong with a step."""

    SCALE_TOO_HIGH = "scale too high (normal)"
    BEYOND_FORMAT = "beyond the format"
    NOT_FINITE_IN_FP32 = "not finite in fp32 too: model, data or learning rate"
    DIVERGING = "diverging, in fp32 too: learning rate, model or data"
    UNDERFLOW = "underflow: scale too low"
    NO_FAULT = "no fault found"


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a step and what helps.

    Attributes:
        kind: the verdict.
        finding: the first place out of range; None where there is none.
        remedy: modules to pin and ops to move to fp32; empty where that is no way out.
        proven: the step is finite with the remedy.
        octaves: by which the scale must change for the step to be finite (< 0), or to lose fewer
            gradients (> 0); 0 where that does not help.
        lost: share of half gradients below half's normal range at the present scale, and
            `lost_then` at the changed one; nan where not known.
        replays: all that were made, in order.
    """

    kind: Kind
    finding: Finding | None
    remedy: Setting = field(default_factory=Setting)
    proven: bool = False
    octaves: int = 0
    lost: float = math.nan
    lost_then: float = math.nan
    replays: tuple[Replay, ...] = ()


def judge(case: Case) -> Verdict:
    """Replay a step until it is clear what is wrong with it. The model is left as it was."""
    return _Examination(case).verdict()


class _Examination:
    """Replays as they are needed, each once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._made: dict[Setting, Replay] = {}

    def verdict(self) -> Verdict:
        full, own = self._replay(Setting(fp32=True)), self._replay(Setting())
        if not full.finite:
            finding = first_bad_input(self._case) or first_of_fp32(self._case, full)
            return self._verdict(Kind.NOT_FINITE_IN_FP32, finding)
        if own.finite:
            return self._of_finite(own, full)
        finding = first_of(self._case, own, full)
        if self._diverging(full):
            return self._verdict(Kind.DIVERGING, finding)
        return self._of_overflow(finding, full)

    def _diverging(self, full: Replay) -> bool:
        first = self._case.first_loss
        return first is not None and abs(full.loss) > _DIVERGED * max(abs(first), 1e-6)

    def _of_overflow(self, finding: Finding | None, full: Replay) -> Verdict:
        down = self._octaves_down()
        if down:
            lower = self._replay(Setting(octaves=-down))
            lost = lost_share(lower, full)
            if lost > LOST:
                pinned = self._pinned(0)
                if pinned.proven and lost_share(self._replay(pinned.setting), full) < lost * _GAIN:
                    return self._verdict(
                        Kind.BEYOND_FORMAT, finding, remedy=pinned.setting, proven=True
                    )
            return self._verdict(
                Kind.SCALE_TOO_HIGH, finding, octaves=-down, lost_then=lost, proven=True
            )
        pinned = self._pinned(-self._case.room_below)
        return self._verdict(
            Kind.BEYOND_FORMAT, finding, remedy=pinned.setting, proven=pinned.proven
        )

    def _of_finite(self, own: Replay, full: Replay) -> Verdict:
        lost, up = lost_share(own, full), self._octaves_up(full)
        if lost > LOST and up > 0:
            then = lost_share(self._replay(Setting(octaves=up)), full)
            if then < lost * _GAIN:
                finding = most_lost(self._case, own, full)
                return self._verdict(
                    Kind.UNDERFLOW, finding, octaves=up, lost=lost, lost_then=then, proven=True
                )
        return self._verdict(Kind.NO_FAULT, None, lost=lost)

    def _octaves_down(self) -> int:
        """The least number of octaves that make the step finite; 0 where none allowed does."""
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

    def _octaves_up(self, full: Replay) -> int:
        """By how much the scale could grow, with an octave to spare; 0 where it cannot."""
        scale = max(self._case.scales.values())
        octaves = math.log2(safe_scale(largest_gradient(full) * scale, self._case.half) or 1.0)
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
            finding = first_of(self._case, now, full)
            more = None if finding is None else _with(setting, finding)
            if more is None:
                break
            setting = more
        return _Remedy(setting, False)

    def _verdict(self, kind: Kind, finding: Finding | None, **more: object) -> Verdict:
        replays = tuple(self._made.values())
        return Verdict(kind, finding, replays=replays, **more)  # type: ignore[arg-type]

    def _replay(self, setting: Setting) -> Replay:
        if setting not in self._made:
            self._made[setting] = replay(self._case, setting)
        return self._made[setting]


@dataclass(frozen=True)
class _Remedy:
    setting: Setting
    proven: bool


def _with(setting: Setting, finding: Finding) -> Setting | None:
    """The setting with one more module or op in fp32; None where that is nothing new.

    A pinned module hands its gradient on through a cast: who receives it is then the next.
    """
    for place in (finding.place, finding.receiver):
        if place is None or place.module == OUTSIDE:
            continue
        if place.module and place.module not in setting.pins:
            return replace(setting, pins=(*setting.pins, place.module))
        if not place.module and place.op in known_ops() - set(setting.denied):
            return replace(setting, denied=(*setting.denied, place.op))
    return None
