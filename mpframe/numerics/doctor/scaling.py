"""Does the first step overflow, and is the loss scale right for it?

The autopsy diagnoses the first step as it does a failed one. The step runs with the run's own pins,
lists and scale, and each fix has been tried on it.
"""

import math
from collections.abc import Iterator

from mpframe.loss_scaling.adaptive import DEFAULT_SCALE
from mpframe.loss_scaling.powers import safe_scale
from mpframe.numerics.autopsy.diagnosis import Diagnosis, Kind
from mpframe.numerics.autopsy.report import value_of, where_of
from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import ADAPTIVE, Finding, error, note, warning
from mpframe.numerics.remedies import deny_words, pin_words

_MANY_LOST = 0.05


def check_overflow(subject: Subject) -> Iterator[Finding]:
    """What is not finite in the first step's forward and backward pass."""
    diagnosis = subject.diagnosis
    if diagnosis.kind is Kind.NOT_FINITE_IN_FP32:
        where = "" if diagnosis.culprit is None else f" (first {where_of(diagnosis.culprit)})"
        yield error(
            f"model, dataset: the first batch is not finite in fp32 either{where}; look for a "
            "division by zero, a logarithm of zero, or first weights that are too large"
        )
    elif diagnosis.kind is Kind.BEYOND_FORMAT:
        yield error(_beyond(diagnosis), *_remedy(diagnosis))
    elif diagnosis.kind is Kind.SCALE_TOO_HIGH:
        yield _too_high(subject, diagnosis)


def check_small_scale(subject: Subject) -> Iterator[Finding]:
    """Gradients that become 0 at the first scale and not at another, or that are all 0."""
    half, gradients = subject.half, subject.gradients
    if gradients.amax == 0:
        yield warning(
            "model, dataset: all gradients of the first batch are 0, in fp32 too, and nothing is "
            "learnt from it; look at the loss"
        )
    known = subject.scaling in ("static", *ADAPTIVE)
    if half is None or not known or not 0 < gradients.amax < math.inf:
        return
    scale = min(subject.first_scale(own) for own in subject.trainer.scalers.values())
    best = safe_scale(gradients.amax, half) or DEFAULT_SCALE
    lost, least = (gradients.lost_fraction(s, half) for s in (scale, best))
    if lost > _MANY_LOST and least < lost / 2:
        static = subject.scaling == "static"
        option = "loss_scaling.scale" if static else "loss_scaling.init_scale"
        ceiling = float(subject.options.get("loss_scaling.max_scale", 2.0**24))  # Backoff's own
        yield warning(
            f"{option}={scale:g}: too small, {lost:.1%} of the first batch's gradients "
            f"become 0 ({least:.1%} at {best:.3g})",
            *(() if static else _named(subject)),
            f"{option}={_exactly(best)}",
            *([] if static or best <= ceiling else [f"loss_scaling.max_scale={_exactly(best)}"]),
        )


def _beyond(diagnosis: Diagnosis) -> str:
    culprit = diagnosis.culprit
    assert culprit is not None  # A step that is finite in fp32 and not in half has one.
    return f"{where_of(culprit)} on the first batch: {value_of(culprit, diagnosis)}"


def _remedy(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The fix that was tried and made the step finite; fp32 if no other fix did."""
    if not diagnosis.proven:
        return ("dtype=fp32",)
    return (*pin_words(diagnosis.remedy.pins), *deny_words(diagnosis.remedy.denied))


def _too_high(subject: Subject, diagnosis: Diagnosis) -> Finding:
    first = diagnosis.replays[1].passes[0].scale  # After the replay in fp32 comes the run's own.
    # An octave below the scale that was tried: the next batch may have larger gradients.
    fits = 2.0 ** (math.floor(math.log2(first) + diagnosis.octaves) - 1)
    if subject.scaling == "static":
        return error(
            f"loss_scaling.scale={first:g}: too large, the first batch overflows at it",
            f"loss_scaling.scale={_exactly(fits)}",
        )
    floor = float(subject.options.get("loss_scaling.min_scale", 1.0))
    probed = (*_named(subject), "loss_scaling.init_scale=probe")
    if floor > first * 2.0**diagnosis.octaves:
        return error(
            f"loss_scaling.min_scale={floor:g}: too large, the first batch overflows at it",
            *probed,
            f"loss_scaling.min_scale={_exactly(fits)}",
        )
    return note(
        f"loss_scaling.init_scale={first:g}: the first batch overflows, and steps are skipped "
        f"until the scale is down to about {first * 2.0**diagnosis.octaves:g}",
        *probed,
    )


def _named(subject: Subject) -> tuple[str, ...]:
    """The word that names a scaler chosen by `auto`, which has no options to set."""
    name = subject.scaling
    return () if "loss_scaling.init_scale" in subject.options else (f"loss_scaling={name}",)


def _exactly(power: float) -> str:
    """A power of two in all its digits."""
    return str(int(power)) if power >= 1.0 else repr(power)
