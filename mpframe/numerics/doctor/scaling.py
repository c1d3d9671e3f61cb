"""Is the loss scale right for the gradients of the first batch?"""

import math
from collections.abc import Iterator

import torch

from mpframe.numerics.doctor.finding import Finding, error, note, warning
from mpframe.numerics.doctor.patient import Patient
from mpframe.step import wants_probe

_MANY_LOST = 0.05


def check_scaling(patient: Patient) -> Iterator[Finding]:
    """No scale, or one too large or too small; several scalers share their options."""
    half = patient.half
    if half is None:
        return
    kind = patient.options.get("loss_scaling.name")
    if not math.isfinite(patient.gradients.amax):
        yield error(
            "model, dataset: the gradients of the first batch are not finite in fp32 either; look "
            "for a division by zero, a logarithm of zero, or first weights that are too large"
        )
    elif not patient.trainer.scalers:
        yield from _without_scale(patient, half)
    elif kind == "static":
        yield from _static(patient, half)
    else:
        yield from _adaptive(patient, half)


def _without_scale(patient: Patient, half: torch.dtype) -> Iterator[Finding]:
    if half == torch.float16:
        lost = patient.gradients.lost(1.0, half)
        yield warning(
            f"loss_scaling=none with float16: {lost:.1%} of the first batch's gradients become 0",
            "loss_scaling=Backoff",
        )


def _static(patient: Patient, half: torch.dtype) -> Iterator[Finding]:
    seen, scale = patient.gradients, float(patient.options["loss_scaling.scale"])
    best = seen.best_scale(half)
    mend = f"loss_scaling.scale={_exactly(best)}"
    if seen.overflows(scale, half):
        yield error(
            f"loss_scaling.scale={scale:g}: too large, the first batch overflows (its largest "
            f"gradient is {seen.amax:.3g})",
            mend,
        )
        return
    lost, least = seen.lost(scale, half), seen.lost(best, half)
    if lost > _MANY_LOST and least < lost / 2:
        yield warning(
            f"loss_scaling.scale={scale:g}: too small, {lost:.1%} of the first batch's gradients "
            f"become 0 ({least:.1%} at {best:.3g})",
            mend,
        )


def _adaptive(patient: Patient, half: torch.dtype) -> Iterator[Finding]:
    floor = float(patient.options.get("loss_scaling.min_scale", 1.0))
    best = patient.gradients.best_scale(half)
    probed = (*_named(patient), "loss_scaling.init_scale=probe")
    if patient.gradients.overflows(floor, half):
        yield error(
            f"loss_scaling.min_scale={floor:g}: too large, the first batch overflows at it",
            *probed,
            f"loss_scaling.min_scale={_exactly(best)}",
        )
        return
    scalers = patient.trainer.scalers.values()
    first = max((float(own.scale) for own in scalers if not wants_probe(own)), default=0.0)
    if patient.gradients.overflows(first, half):
        yield note(
            f"loss_scaling.init_scale={first:g}: the first batch overflows, and steps are skipped "
            f"until the scale is down to about {best:g}",
            *probed,
        )


def _named(patient: Patient) -> tuple[str, ...]:
    """The word that names a scaler chosen by `auto`, whose options are not there to be set."""
    name = str(patient.options["loss_scaling.name"])
    return () if "loss_scaling.init_scale" in patient.options else (f"loss_scaling={name}",)


def _exactly(power: float) -> str:
    """A power of two in all its digits."""
    return str(int(power)) if power >= 1.0 else repr(power)
