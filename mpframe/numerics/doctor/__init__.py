"""Says before training what will go wrong, and which option fixes it.

Each check looks at a `Patient`, a trainer built as for training, and answers with findings. Nothing
is written, and whatever a check tried is undone.

    hints      options that are allowed and most likely not meant; a run says them, too
    numbers    eps, learning rate, betas in the optimizer's format
    weights    their range in half, and where they were trained
    scaling    does the first step overflow, and at which scale does it not
    ops        BCELoss, norms, dimensions
    speed      emulation, waits for the data
"""

from collections.abc import Callable, Iterable

from mpframe.numerics.doctor import hints
from mpframe.numerics.doctor.finding import Finding, Severity
from mpframe.numerics.doctor.numbers import check_masters, check_numbers
from mpframe.numerics.doctor.ops import (
    check_binary_cross_entropy,
    check_dimensions,
    check_norms,
)
from mpframe.numerics.doctor.patient import Patient
from mpframe.numerics.doctor.scaling import check_overflow, check_small_scale
from mpframe.numerics.doctor.speed import check_emulation, check_loading
from mpframe.numerics.doctor.weights import check_birth, check_small_weights, check_weight_range

Check = Callable[[Patient], Iterable[Finding]]

HINTS: tuple[Check, ...] = (
    hints.check_unscaled,
    hints.check_needless_scaling,
    hints.check_growth,
    hints.check_static_scale,
    hints.check_learning_rate,
    hints.check_clip_norm,
    hints.check_average,
    hints.check_accumulation,
    hints.check_classes,
    hints.check_layers,
)
CHECKS: tuple[Check, ...] = (
    check_numbers,
    check_masters,
    *HINTS,
    check_weight_range,
    check_small_weights,
    check_birth,
    check_overflow,
    check_small_scale,
    check_binary_cross_entropy,
    check_norms,
    check_dimensions,
    check_emulation,
    check_loading,
)

__all__ = ["CHECKS", "HINTS", "Finding", "Patient", "Severity", "examine", "hints_on"]


def examine(patient: Patient) -> list[Finding]:
    """The findings of all checks, the worst first."""
    return _found(CHECKS, patient)


def hints_on(patient: Patient) -> list[Finding]:
    """What a run says at its start: the findings that nothing is computed for."""
    return _found(HINTS, patient)


def _found(checks: Iterable[Check], patient: Patient) -> list[Finding]:
    found = [finding for check in checks for finding in check(patient)]
    return sorted(found, key=lambda finding: finding.severity)
